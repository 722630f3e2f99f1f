"""FedCA: contrast with embeddings of all clients, and alignment to a base model.

Zhang et al. 2020, Federated Unsupervised Representation Learning (FITEE 2023). There is no public code, and the paper
is not among the project's sources: what follows, including the numbers, is from memory and unverified.

    L = -log[ exp(q.k / tau) / (exp(q.k / tau) + sum_{d in D} exp(q.d / tau)) ]  +  beta ||f(x) - f_base(x)||,  x public

tau is `temperature`, beta `alignment_weight`. D, the module `dictionary`, is broadcast with the weights and does not
change during the round. After training, every client sends unit-length embeddings of `client_dictionary_size` random
images, and the coordinator combines them into the next D of `dictionary_size`. Before the first round, the coordinator
trains f_base by SimCLR on the public images, and broadcasts it.

Choices where memory is not enough, so published numbers are not to be expected: q and k are the online network's
embeddings of the two views, both orders averaged, k without gradient. f is the encoder; the distance is Euclidean, and
its mean is over as many public images as the batch has. f_base starts from the run's initial weights and trains with
the run's optimiser at its learning rate, without its schedule, with the run's batch size and augmentation, at tau, for
`num_base_epochs`. Each entry of a client is of one augmented view, as in training; images repeat if there are too few.
Before the first round D is random, so the first round's loss is lower than the later ones'. Entries of clients that are
not in the cohort stay in D until newer ones displace them: the newest come first, one of each client in turn.

All negatives are in D, and D does not follow the queries: with a small D they may drift away from it together, and the
loss then stays near log(1 + Q).

Views and public images pass the network as separate batches, so that public images do not enter the BatchNorm
statistics of the views. Cold start: nothing is kept.
"""

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from fedssl.artifacts.tensors import Tensors
from fedssl.data.augment import normalize, random_view, to_float
from fedssl.data.batches import epoch_batches
from fedssl.errors import MethodError
from fedssl.losses import info_nce, nt_xent
from fedssl.methods.api import Batch, ClientData, Context, Losses, Terms, Update
from fedssl.methods.composition.embedding import embed_views
from fedssl.methods.composition.modules import copy_of, declare, load_modules, module_of
from fedssl.methods.composition.part import ENCODER, PROJECTOR, Objective, Online, Wire
from fedssl.methods.composition.streams import PUBLIC
from fedssl.protocol.methods.fedca import FedCAConfig
from fedssl.protocol.plan import ArtifactPlan, TensorSpec
from fedssl.protocol.training import OptimizerConfig
from fedssl.unit_vectors import directions

DICTIONARY, CLIENT_DICTIONARY, BASE = "dictionary", "client_dictionary", "base_encoder"


class Dictionary(nn.Module):
    """D (Q, D), as received."""

    entries: torch.Tensor

    def __init__(self, size: int, width: int) -> None:
        super().__init__()
        self.register_buffer("entries", torch.zeros(size, width))


@dataclass(frozen=True)
class DictionaryContrast(Objective):
    """InfoNCE between views against the dictionary of all clients, and closeness to the base model on public images."""

    config: FedCAConfig

    joint_forward: ClassVar[bool] = False

    @property
    def streams(self) -> tuple[str, ...]:
        return (PUBLIC,) if self.config.alignment_weight else ()

    def heads(self, modules: nn.ModuleDict, ctx: Context) -> dict[str, nn.Module]:
        dictionary = Dictionary(self.config.dictionary_size, self.config.embedding_width(ctx.spec.model))
        base = {BASE: copy_of(modules[ENCODER])} if self.config.alignment_weight else {}
        return {DICTIONARY: dictionary, **base}

    def begin(self, modules: nn.ModuleDict, broadcast: Tensors, data: ClientData, ctx: Context) -> None:
        _entries(modules).copy_(broadcast[DICTIONARY])
        if BASE in modules:
            load_modules(modules, (BASE,), broadcast, "broadcast")
            modules[BASE].eval()

    def terms(self, online: Online, modules: nn.ModuleDict, batch: Batch, ctx: Context) -> Terms:
        (z1, z2), entries, temperature = online.z, _entries(modules), self.config.temperature
        contrast = (info_nce(z1, z2, entries, temperature) + info_nce(z2, z1, entries, temperature)) / 2
        if BASE not in modules:
            return {"info_nce": contrast}, {}
        with torch.no_grad():
            base = modules[BASE](batch.extra[PUBLIC])
        h, _ = online.extra[PUBLIC]
        distance = torch.linalg.vector_norm(h.float() - base.float(), dim=1).mean()
        return {"info_nce": contrast, "alignment": self.config.alignment_weight * distance}, {}

    def extra_update(self, modules: nn.ModuleDict, data: ClientData, ctx: Context) -> Tensors:
        network = [modules[name] for name in (ENCODER, PROJECTOR) if name in modules]
        entries = embed_views(network, data, self.config.client_dictionary_size, CLIENT_DICTIONARY, ctx)
        return {CLIENT_DICTIONARY: directions(entries)}

    @property
    def wire(self) -> Wire:
        return Wire(plan=self._plan, initial_state=self._initial_state, aggregate=self._aggregate)

    def _plan(self, modules: nn.ModuleDict, ctx: Context) -> ArtifactPlan:
        width = self.config.embedding_width(ctx.spec.model)
        sizes = ((DICTIONARY, self.config.dictionary_size), (CLIENT_DICTIONARY, self.config.client_dictionary_size))
        down, up = (
            TensorSpec(name=name, dtype="F32", shape=(size, width), kind="dictionary", reduce="method")
            for name, size in sizes
        )
        base = sorted(modules[BASE].state_dict().items()) if BASE in modules else []
        kept = (declare(f"{BASE}.{name}", tensor).model_copy(update={"reduce": "keep"}) for name, tensor in base)
        return ArtifactPlan(broadcast=(down, *kept), update=(up,))

    def _initial_state(self, modules: nn.ModuleDict, ctx: Context) -> Tensors:
        generator = torch.Generator().manual_seed(ctx.seed(DICTIONARY))
        state = {DICTIONARY: F.normalize(torch.randn(_entries(modules).shape, generator=generator), dim=1)}
        if BASE in modules:
            online = nn.ModuleDict({name: modules[name] for name in (ENCODER, PROJECTOR) if name in modules})
            task = BaseTraining(
                initial=online,
                num_epochs=self.config.num_base_epochs,
                temperature=self.config.temperature,
                optimizer=ctx.spec.training.optimizer,
            )
            base, _ = ctx.distil(task, ctx)
            state.update(base)
        return state

    def _aggregate(self, state: Tensors, updates: Sequence[Update], ctx: Context) -> Tensors:
        base = {name: tensor for name, tensor in state.items() if name.startswith(f"{BASE}.")}
        of_clients = [each.load()[CLIENT_DICTIONARY].clone() for each in updates]  # copies keep only themselves
        return {DICTIONARY: combined(state[DICTIONARY], of_clients), **base}


def combined(previous_QD: torch.Tensor, of_clients: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the next dictionary (Q, D): the clients' first entries, their second ones and so on, then the previous
    ones."""
    newest = torch.stack(list(of_clients), dim=1).flatten(0, 1)
    return torch.cat([newest, previous_QD])[: len(previous_QD)]


@dataclass(frozen=True)
class BaseTraining:
    """f_base: SimCLR on the public images, from the run's initial weights."""

    initial: nn.ModuleDict
    num_epochs: int
    temperature: float
    optimizer: OptimizerConfig

    def build(self, ctx: Context) -> nn.ModuleDict:
        return copy.deepcopy(self.initial)

    def steps(self, modules: nn.ModuleDict, epoch: int, ctx: Context) -> Iterator[Losses]:
        if ctx.public is None:
            raise MethodError("fedca trains its base model on public images, and there are none here")
        training, images = ctx.spec.training, ctx.public.images
        order = torch.Generator().manual_seed(ctx.seed(f"base/{epoch}"))
        views = ctx.generator(f"base_views/{epoch}")
        for indices in epoch_batches(len(images), training.batch_size, order, training.drop_last, images.device):
            chosen = to_float(images.index_select(0, indices.repeat(2)))
            z = normalize(random_view(chosen, ctx.spec.data.augmentation, views), ctx.spec.data)
            for module in modules.values():
                z = module(z)
            z1, z2 = z.chunk(2)
            yield {"nt_xent": nt_xent(z1, z2, self.temperature)}

    def result(self, modules: nn.ModuleDict) -> Tensors:
        return {f"{BASE}.{name}": tensor for name, tensor in modules[ENCODER].state_dict().items()}


def _entries(modules: nn.ModuleDict) -> torch.Tensor:
    return module_of(modules, DICTIONARY, Dictionary).entries
