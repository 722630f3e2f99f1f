"""FedRLC's merge rule: FedEMA's rule for the network, and its own rule for the cluster centers.

Miao & Koyuncu 2024, Clustering-Guided Federated Learning of Representations, Section 3.2. On download, with the global
encoder f_* and centers mu_*, and the client's own f_k and mu_k as its last round left them:

    z_* = (f_*(x^a) + f_*(x^b)) / 2,   z_k = (f_k(x^a) + f_k(x^b)) / 2     for every image x of the client
    epsilon = mean_i KL(q(z_*; mu_*)_i || q(z_k; mu_k)_i)                                           (Eq. 11)
    mu <- (epsilon mu_k + mu_*) / (1 + epsilon)                                                     (Eq. 10)
    (f, g) <- gamma (f_k, g_k) + (1 - gamma) (f_*, g_*)                                             (Eq. 12)

f is encoder and projector, as in the paper's first footnote. gamma is `merges/ema.py`'s mu. epsilon = 0 gives the
global centers. In a client's first round, or if FedEMA's rule overwrites, mu = mu_* and epsilon is not computed.

The paper leaves open: f runs in eval mode, without gradients, and the views are the training's augmentations.
`centers` "global" leaves Eq. 10 out.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from fedssl.artifacts.tensors import Tensors
from fedssl.data.image_batches import index_device, random_views, take_each
from fedssl.losses import assignment_divergence
from fedssl.methods.add_ons.crossed_kl import CENTERS
from fedssl.methods.api import ClientData, Context
from fedssl.methods.composition.modules import load_modules
from fedssl.methods.composition.part import ENCODER, PROJECTOR
from fedssl.methods.merges.divergence import copies, memory
from fedssl.methods.merges.ema import MEMORY, MIXED, DivergenceAwareEMA
from fedssl.protocol.methods.merges import CenterMergeConfig

_CHUNK = 512


@dataclass(frozen=True)
class CenterMerge(DivergenceAwareEMA):
    """Mix the client's network and centers into the global ones."""

    config: CenterMergeConfig

    remembered: ClassVar[tuple[str, ...]] = (*MIXED, CENTERS)

    def heads(self, modules: nn.ModuleDict, ctx: Context) -> dict[str, nn.Module]:
        heads = super().heads(modules, ctx)
        heads[MEMORY].register_buffer("epsilon", torch.zeros(()))
        return heads

    def begin(self, modules: nn.ModuleDict, broadcast: Tensors, data: ClientData, ctx: Context) -> None:
        super().begin(modules, broadcast, data, ctx)
        if self.config.centers == "global" or not self.mixes(modules, ctx):
            return
        kept = memory(modules, MEMORY)
        received = copies(modules, (ENCODER, PROJECTOR, CENTERS))
        load_modules(received, received, broadcast, "broadcast")
        epsilon = center_divergence(received, kept.local, data, ctx)
        kept.number("epsilon").copy_(epsilon)
        mixed = mixed_centers(received[CENTERS].get_parameter("mu"), kept.local[CENTERS].get_parameter("mu"), epsilon)
        with torch.no_grad():
            modules[CENTERS].get_parameter("mu").copy_(mixed)


def mixed_centers(received_MD: Tensor, local_MD: Tensor, epsilon: Tensor) -> Tensor:
    """Return (epsilon mu_k + mu_*) / (1 + epsilon)."""
    return torch.lerp(received_MD, local_MD, epsilon / (1 + epsilon))


@torch.no_grad()
def center_divergence(received: nn.ModuleDict, local: nn.ModuleDict, data: ClientData, ctx: Context) -> Tensor:
    """Return epsilon, over all images of the client."""
    views = ctx.generator("center-views")
    total = torch.zeros((), device=data.images.device)
    chunks = torch.split(torch.arange(len(data), device=index_device(data.images)), _CHUNK)
    for images in take_each(data.images, chunks):
        pair = [random_views(images, ctx.spec.data, views) for _ in range(2)]
        total += len(images) * assignment_divergence(_assigned(received, pair), _assigned(local, pair))
    return total / len(data)


def _assigned(network: nn.ModuleDict, views: list[Tensor]) -> Tensor:
    network.eval()
    first, second = (network[PROJECTOR](network[ENCODER](view)) for view in views)
    assignment: Tensor = network[CENTERS]((first + second) / 2)
    return assignment
