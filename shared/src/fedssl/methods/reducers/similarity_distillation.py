"""FLESD's reducer: a student learns the similarities that the clients find together.

Shi et al. 2021, Section 4.3. The student f_S starts as the global model, and a momentum encoder mu as its copy. Each
step takes two views of a batch of B' public images i:

    keys of one view by the momentum encoder go into the queue, a ring of the last m = `num_anchors`, with their j
    p^i_j = M_ij / sum_u M_iu,   M = 1/|S| sum_k exp(S_k / tau_T)          over the queue     (Eq. 5, 6, 8)
    q^i_j = softmax_j(<n(f_S(x_i)), n(key_j)> / tau_S)                     on the other view  (Eq. 7)
    L = mean_i KL(p^i || q^i), up to the entropy of p                                         (Eq. 9)
    mu <- zeta mu + (1 - zeta) theta, parameters only                                         (Eq. 10)

tau_T is `temperature`, tau_S `student_temperature`, zeta `momentum`, B' `batch_size`. S_k comes from
`reducers/similarity.py`. The global model of the next round is the student. The same training, on a client with an
encoder of its own, is `merges/client_distillation.py`.

As in the authors' code, the batch's own keys are in the queue before the loss, so an image is an anchor of itself, with
similarity 1. Deviation: steps that only fill the queue (2048/128 = 16) are taken once per round. The code takes them at
the start of every epoch (`skip` "every_epoch"), which was probably not intended, and never trains if an epoch has no
other steps. Deviation: an incomplete last batch is trained on, which the code leaves out: public images may be few.
Deviation: steps that only fill the queue do not pass the student, so its BatchNorm statistics do not see their images.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedssl.artifacts.tensors import Tensors
from fedssl.data.augment import normalize, random_view, to_float
from fedssl.data.batches import epoch_batches
from fedssl.losses import similarity_distillation
from fedssl.methods.api import Context, Losses, Metrics, ServerState, Update
from fedssl.methods.composition.follower import KEYS
from fedssl.methods.composition.modules import load_modules, module_of, tensors_of
from fedssl.methods.composition.part import ENCODER, PROJECTOR
from fedssl.methods.composition.ring import Ring
from fedssl.methods.composition.server import Reducer
from fedssl.methods.reducers.similarity import NAMES, Ensemble, public_images
from fedssl.models import build_encoder, build_mlp, initialised
from fedssl.protocol.methods.distillation import DistillationConfig
from fedssl.protocol.model import EncoderConfig
from fedssl.protocol.training import OptimizerConfig

STUDENT = (ENCODER, PROJECTOR)
_QUEUE = "queue"


def distillation(config: DistillationConfig) -> Reducer:
    """Return the reducer that distils the clients' similarities into a student."""

    def reduce(updates: Sequence[Update], state: ServerState, ctx: Context) -> tuple[Tensors, Metrics]:
        name = NAMES[config.form]
        packed = [update.load()[name].to(ctx.device) for update in updates]
        ensemble = Ensemble(packed, config.packing, len(public_images(ctx)))
        return ctx.distil(SimilarityDistillation(config, ensemble, state), ctx)

    return Reducer(reduce)


class AnchorQueue(Ring):
    """A ring of the latest keys, and which images they are of."""

    images: Tensor

    def __init__(self, size: int, width: int) -> None:
        super().__init__(torch.zeros(size, width))
        self.register_buffer("images", torch.zeros(size, dtype=torch.int64))

    @torch.no_grad()
    def push_of(self, keys_BD: Tensor, images_B: Tensor) -> None:
        """Replace the oldest keys by those of these images. A batch must fit."""
        self.images.index_copy_(0, self.push(keys_BD), images_B)


def network(config: EncoderConfig, weights: Tensors, what: str, ctx: Context) -> nn.ModuleDict:
    """Return an encoder, and the projector if `weights` have one, with these weights. `what` names them in an error."""

    def build() -> nn.ModuleDict:
        encoder = build_encoder(config, ctx.spec.data.channels, ctx.spec.data.image_size)
        modules = nn.ModuleDict({ENCODER: encoder})
        if ctx.spec.model.projector is not None and any(name.startswith(f"{PROJECTOR}.") for name in weights):
            modules[PROJECTOR] = build_mlp(ctx.spec.model.projector, encoder.feature_dim)
        return modules

    modules = initialised(build, ctx.seed("distillation"))
    load_modules(modules, modules, weights, what)
    return modules


@dataclass(frozen=True)
class SimilarityDistillation:
    """A training for the engine. `start` are the student's first weights, which are the global model's. `encoder` is
    the student's if it is not the run's."""

    config: DistillationConfig
    ensemble: Ensemble
    start: Tensors
    encoder: EncoderConfig | None = None

    @property
    def num_epochs(self) -> int:
        return self.config.num_epochs

    @property
    def optimizer(self) -> OptimizerConfig:
        return self.config.optimizer

    def build(self, ctx: Context) -> nn.ModuleDict:
        encoder = self.encoder or ctx.spec.model.encoder
        student = network(encoder, self.start, "global model", ctx)
        projector = ctx.spec.model.projector
        width = projector.out_dim if projector is not None and PROJECTOR in student else encoder.feature_dim
        return nn.ModuleDict(
            {**dict(student.items()), **KEYS.built(student), _QUEUE: AnchorQueue(self.config.num_anchors, width)}
        )

    def steps(self, modules: nn.ModuleDict, epoch: int, ctx: Context) -> Iterator[Losses]:
        config, public, queue = self.config, public_images(ctx), module_of(modules, _QUEUE, AnchorQueue)
        order = torch.Generator().manual_seed(ctx.seed(f"distillation/order/{epoch}"))
        views = ctx.generator(f"distillation/views/{epoch}")
        temperature = config.student_temperature or config.temperature
        filling = config.num_filling_steps if epoch == 0 or config.skip == "every_epoch" else 0
        batches = epoch_batches(len(public), config.batch_size, order, drop_last=False, device=public.images.device)
        for number, rows in enumerate(batches):
            pixels = to_float(public.images.index_select(0, rows))
            query, key = (_view(pixels, views, ctx) for _ in range(2))
            queue.push_of(KEYS.embed(modules, key), rows)
            if number >= filling:
                target = self.ensemble.rows(rows, queue.images, config.temperature)
                loss = similarity_distillation(_run(modules, query), queue.keys, target, temperature)
                yield {"distillation": loss}
            KEYS.follow(modules, config.momentum)  # steps that only fill the queue too: Eq. 10 is for every step

    def result(self, modules: nn.ModuleDict) -> Tensors:
        return tensors_of(modules, _present(modules))


def _view(pixels: Tensor, generator: torch.Generator, ctx: Context) -> Tensor:
    return normalize(random_view(pixels, ctx.spec.data.augmentation, generator), ctx.spec.data)


def _present(modules: nn.ModuleDict) -> list[str]:
    return [name for name in STUDENT if name in modules]


def _run(modules: nn.ModuleDict, images: Tensor) -> Tensor:
    for name in _present(modules):
        images = modules[name](images)
    return images
