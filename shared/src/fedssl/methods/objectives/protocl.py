"""FedProtoCL: FedAvg of ProtoCL, momentum contrast with prototypes of clusters.

Li et al. 2021, Prototypical Contrastive Learning, Eq. 11 and 12; federated as a baseline of FedX (Han et al. 2022),
which gives no details and no code. Encoder and projector are averaged; queue, clusterings and prototypes stay on the
client.

    L = InfoNCE + mean over C clusterings of -log[ exp(q.c_s / phi_s) / sum_j exp(q.c_j / phi_j) ]

Before every epoch the key network embeds all the client's images, un-augmented and in evaluation mode; k-means makes C
clusterings of them (`images_per_cluster`), c are their centroids, and phi measures how tight each cluster is. tau is
`temperature`: of InfoNCE, and the mean of phi. r, the queue's length, is `queue_size`. In ProtoCL, r is also the number
of sampled negative prototypes; here all prototypes are negatives.

Every epoch computes its own prototypes, so none are kept from round to round. Queue and cold start are those of
`objectives/moco.py`.

Deviations from ProtoCL's code, where FedX does not specify it: both views are queries and their losses are added, as
in FedMoCo; the clusters are fewer, as n is; k-means is by cosine; warm-up counts rounds; m is 0.99.
"""

from collections.abc import Hashable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn

from fedssl.aggregation import spherical_kmeans
from fedssl.losses import prototype_concentrations, prototype_contrast
from fedssl.methods.api import Batch, ClientData, Context, Terms
from fedssl.methods.composition.embedding import embed
from fedssl.methods.composition.follower import KEYS
from fedssl.methods.composition.modules import module_of
from fedssl.methods.composition.part import Online
from fedssl.methods.objectives.moco import MomentumContrast
from fedssl.protocol.methods.fedprotocl import FedProtoCLConfig

_PROTOTYPES = "prototypes"


class Prototypes(NamedTuple):
    """One clustering: c (M, D), the cluster s (N,) of every image of the client, and phi (M,)."""

    centroids: torch.Tensor
    assignments: torch.Tensor
    concentrations: torch.Tensor


class Clusterings(nn.Module):
    """The epoch's clusterings; none during warm-up."""

    def __init__(self) -> None:
        super().__init__()
        self.current: list[Prototypes] = []
        self.version = 0
        """Changes when `current` moves in memory."""

    def replace(self, found: list[Prototypes]) -> None:
        """Replace them by another epoch's, in place if the sizes are equal: captured steps continue to read there."""
        old, new = ([tensor for each in group for tensor in each] for group in (self.current, found))
        if [tensor.shape for tensor in old] != [tensor.shape for tensor in new]:
            self.current, self.version = found, self.version + 1
            return
        for place, tensor in zip(old, new, strict=True):
            place.copy_(tensor)


@dataclass(frozen=True)
class ProtoCL(MomentumContrast):
    """Momentum contrast, and each query with its image's prototype against the others."""

    config: FedProtoCLConfig

    def heads(self, modules: nn.ModuleDict, ctx: Context) -> dict[str, nn.Module]:
        return {**super().heads(modules, ctx), _PROTOTYPES: Clusterings()}

    def begin_epoch(self, modules: nn.ModuleDict, data: ClientData, epoch: int, ctx: Context) -> None:
        warms_up = ctx.round_number <= self.config.num_warmup_rounds(ctx.spec.num_rounds)
        _clusterings(modules).replace([] if warms_up else self._found(modules, data, epoch, ctx))

    def _found(self, modules: nn.ModuleDict, data: ClientData, epoch: int, ctx: Context) -> list[Prototypes]:
        found = []
        embeddings = embed(KEYS.network(modules), data.images, ctx)
        for number, images_per_cluster in enumerate(self.config.images_per_cluster):
            num_clusters = min(len(data), max(2, len(data) // images_per_cluster))
            # On the CPU, so that every device starts from the same images.
            generator = torch.Generator().manual_seed(ctx.seed(f"prototypes/{epoch}/{number}"))
            clustering = spherical_kmeans(
                embeddings, num_clusters, generator=generator, num_iterations=self.config.num_kmeans_iterations
            )
            concentrations = prototype_concentrations(embeddings, *clustering, temperature=self.config.temperature)
            found.append(Prototypes(*clustering, concentrations))
        return found

    def step_constants(self, modules: nn.ModuleDict, ctx: Context) -> Hashable:
        return super().step_constants(modules, ctx), _clusterings(modules).version

    def terms(self, online: Online, modules: nn.ModuleDict, batch: Batch, ctx: Context) -> Terms:
        losses, measurements = super().terms(online, modules, batch, ctx)
        if found := _clusterings(modules).current:
            contrasts = [
                prototype_contrast(z, each.centroids, each.assignments[batch.indices], each.concentrations)
                for each in found
                for z in online.z
            ]
            losses["prototypes"] = torch.stack(contrasts).sum() / len(found)
        return losses, measurements


def _clusterings(modules: nn.ModuleDict) -> Clusterings:
    return module_of(modules, _PROTOTYPES, Clusterings)
