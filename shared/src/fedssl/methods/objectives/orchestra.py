"""Orchestra: the views of each image agree on clusters that are found from all clients' centroids.

Lubana et al. 2022, Orchestra: Unsupervised Federated Learning via Globally Consistent Clustering; sizes and steps as in
the authors' code. With z = g(f(x)) of the online network, t of the target network, C the global centroids:

    L = -sum_m softmax(n(t(x1)) C / T)_m log softmax(n(z(x2)) C / T)_m  +  CE(rotation head(z(x3)), quarter turns of x3)

T is `temperature`; x3 is the stream `rotated`. Before every forward pass t = m t + (1 - m) z, parameters only, m is
`target_momentum`. The memory is a FIFO of the last n(t(x1)); after training a client clusters it into local centroids
by k-means with clusters of equal size, and sends those. The coordinator clusters all of them into the next C, starting
from the previous C. C is frozen on clients. In round 1 it is random, and with `clustering_round` that round only
clusters.

`target` "shared" (default) sends the target network and averages it like the online one, as the authors' code does
unless its clients are stateful; "kept" keeps it on the client. The memory is kept, as the authors' code intends,
although its simulated clients lose it. Cold start: the target network, whose statistics do not change, fills the memory
from one augmented view each of random images of the client, repeated if there are few; a kept target copies the online
network just received.

As in the authors' code, x1 passes the online network too, which updates its BatchNorm statistics and feeds add-ons.
The code blurs less and solarizes in view 2: `data.second_view`.

Deviations: quarter turns are spread evenly within a batch, while the code draws them. Clients with few images have
small clusters: the `memory_size` / `num_local_centroids` embeddings whose mean a local centroid is may be views of a
single image.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from fedssl.aggregation import balanced_kmeans, global_centroids
from fedssl.artifacts.tensors import Tensors
from fedssl.losses import cluster_assignment
from fedssl.methods.api import Batch, ClientData, Context, Schedule, Terms, Update
from fedssl.methods.composition.embedding import embed_views
from fedssl.methods.composition.follower import TARGET
from fedssl.methods.composition.modules import module_of
from fedssl.methods.composition.part import PROJECTOR, Objective, Online, Wire
from fedssl.methods.composition.streams import ROTATED, quarter_turns
from fedssl.protocol.methods.orchestra import OrchestraConfig
from fedssl.protocol.plan import ArtifactPlan, TensorSpec
from fedssl.unit_vectors import unit

ROTATION, MEMORY = "rotation", "memory"
GLOBAL, LOCAL = "global_centroids", "local_centroids"


class EmbeddingMemory(nn.Module):
    """A client's last target embeddings, unit vectors, oldest first: not a ring, because k-means starts from their
    order."""

    embeddings: torch.Tensor
    is_filled: torch.Tensor

    def __init__(self, size: int, width: int) -> None:
        super().__init__()
        self.register_buffer("embeddings", torch.zeros(size, width))
        self.register_buffer("is_filled", torch.zeros((), dtype=torch.int64))

    @torch.no_grad()
    def push(self, embeddings_BD: torch.Tensor) -> None:
        """Add new embeddings; the oldest leave."""
        newest = unit(embeddings_BD.detach().float())
        self.embeddings.copy_(torch.cat([self.embeddings, newest])[-len(self.embeddings) :])
        self.is_filled.fill_(1)


class Centroids(nn.Module):
    """C (M, D), as received."""

    current: torch.Tensor

    def __init__(self, size: int, width: int) -> None:
        super().__init__()
        self.register_buffer("current", torch.zeros(size, width))


@dataclass(frozen=True)
class Orchestra(Objective):
    """Predict the cluster of the other view, and how far a third view is turned. The target network is kept."""

    config: OrchestraConfig

    shared: ClassVar[tuple[str, ...]] = (PROJECTOR, ROTATION)
    kept: ClassVar[tuple[str, ...]] = (*TARGET.names.values(), MEMORY)
    joint_forward: ClassVar[bool] = False

    @property
    def streams(self) -> tuple[str, ...]:
        return (ROTATED,) if self.config.rotation_weight else ()

    def schedule(self, schedule: Schedule, num_images: int, ctx: Context) -> Schedule:
        only_clusters = self.config.clustering_round and ctx.round_number == 1
        return replace(schedule, num_epochs=0) if only_clusters else schedule

    def heads(self, modules: nn.ModuleDict, ctx: Context) -> dict[str, nn.Module]:
        width = self.config.embedding_width(ctx.spec.model)
        rotation = {ROTATION: nn.Linear(width, 4)} if self.config.rotation_weight else {}
        memory = EmbeddingMemory(self.config.memory_size, width)
        return {
            **TARGET.built(modules),
            **rotation,
            MEMORY: memory,
            GLOBAL: Centroids(self.config.num_global_centroids, width),
        }

    def start_cold(self, modules: nn.ModuleDict, ctx: Context) -> None:
        if self.config.target == "kept":
            TARGET.restart(modules)

    def begin(self, modules: nn.ModuleDict, broadcast: Tensors, data: ClientData, ctx: Context) -> None:
        _centroids(modules).current.copy_(broadcast[GLOBAL])
        if not int(_memory(modules).is_filled):
            _memory(modules).push(embed_views(TARGET.network(modules), data, self.config.memory_size, MEMORY, ctx))

    def before_step(self, modules: nn.ModuleDict, ctx: Context) -> None:
        TARGET.follow(modules, self.config.target_momentum)

    def terms(self, online: Online, modules: nn.ModuleDict, batch: Batch, ctx: Context) -> Terms:
        t1 = TARGET.embed(modules, batch.views[0])
        _memory(modules).push(t1)
        centroids = _centroids(modules).current
        losses = {"clustering": cluster_assignment(online.z[1], t1, centroids, self.config.temperature)}
        if ROTATION in modules:
            _, z3 = online.extra[ROTATED]
            turns = F.cross_entropy(modules[ROTATION](z3).float(), quarter_turns(len(z3), z3.device))
            losses["rotation"] = self.config.rotation_weight * turns
        return losses, {}

    def extra_update(self, modules: nn.ModuleDict, data: ClientData, ctx: Context) -> Tensors:
        # On the CPU, so that every device starts from the same embeddings.
        generator = torch.Generator().manual_seed(ctx.seed(LOCAL))
        embeddings = _memory(modules).embeddings
        return {LOCAL: balanced_kmeans(embeddings, self.config.num_local_centroids, generator=generator).centroids}

    @property
    def wire(self) -> Wire:
        return Wire(plan=self._plan, initial_state=self._initial_state, aggregate_apart=self._aggregate)

    def _plan(self, modules: nn.ModuleDict, ctx: Context) -> ArtifactPlan:
        width = self.config.embedding_width(ctx.spec.model)
        sizes = ((GLOBAL, self.config.num_global_centroids), (LOCAL, self.config.num_local_centroids))
        down, up = (
            TensorSpec(name=name, dtype="F32", shape=(size, width), kind="centroids", reduce="method")
            for name, size in sizes
        )
        return ArtifactPlan(broadcast=(down,), update=(up,))

    def _initial_state(self, modules: nn.ModuleDict, ctx: Context) -> Tensors:
        shape = _centroids(modules).current.shape
        return {GLOBAL: F.normalize(torch.randn(shape, generator=torch.Generator().manual_seed(ctx.seed(GLOBAL))))}

    def _aggregate(self, state: Tensors, updates: Sequence[Update], ctx: Context) -> Tensors:
        local = torch.cat([update.load()[LOCAL].clone() for update in updates])  # a view would keep all of it in memory
        found = global_centroids(
            local,
            self.config.num_global_centroids,
            generator=torch.Generator().manual_seed(ctx.seed(GLOBAL)),
            initial_MD=state[GLOBAL],
            num_steps=self.config.num_global_steps,
            temperature=self.config.temperature,
        )
        return {GLOBAL: found}


@dataclass(frozen=True)
class SharingOrchestra(Orchestra):
    """Orchestra with a target network that is sent and averaged too."""

    shared: ClassVar[tuple[str, ...]] = (PROJECTOR, ROTATION, *TARGET.names.values())
    kept: ClassVar[tuple[str, ...]] = (MEMORY,)


def orchestra(config: OrchestraConfig) -> Orchestra:
    """Return the objective whose target network is sent or kept, depending on the config."""
    return SharingOrchestra(config) if config.target == "shared" else Orchestra(config)


def _memory(modules: nn.ModuleDict) -> EmbeddingMemory:
    return module_of(modules, MEMORY, EmbeddingMemory)


def _centroids(modules: nn.ModuleDict) -> Centroids:
    return module_of(modules, GLOBAL, Centroids)
