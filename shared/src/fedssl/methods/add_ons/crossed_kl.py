"""FedRLC's crossed divergence of cluster assignments, with data selection, as an add-on.

Miao & Koyuncu 2024, Clustering-Guided Federated Learning of Representations, Section 3.1. Centers mu_1 ... mu_M are
trained with the network, and sent and averaged like its weights. With z^O = g(f(x)) of the online network (with
predictor) and z^T = f_T(x) of the target network, on the views a and b:

    q_m(z) = (1 + ||z - mu_m||^2)^e / sum_n (1 + ||z - mu_n||^2)^e                               (Eq. 4, 5)
    p      = the target network's q, squared, over its sum in the batch, rows scaled to 1        (Eq. 6)
    L_CKL  = 1/N sum_i [argmax q^T(b)_i = argmax q^O(a)_i] KL(p^T(b)_i || q^O(a)_i) + a and b swapped   (Eq. 8)

M is `num_centers`, e is `exponent`, N the batch. Default e = -1/2 as printed; DEC's Student t is -1, with the same hard
labels. Eq. 6 prints q^{a,T} for q^{alpha,T}; its sum over i is over the batch.

`scale` "raw" (default, Eq. 4) takes embeddings as they are and centers that start standard normal. In 2048 dimensions,
this gives a nearly uniform q: check the metric centers_used. "unit" takes embeddings of unit length, and centers that
start as random unit vectors. In both cases the coordinator draws the first centers and every client starts from them
(Algorithm 1, line 1): the mean of centers that each client draws by itself combines centers of different clusters.

The coordinator averages centers by the clients' numbers of images, as the paper does, whatever its reducer does with
the weights: a scaled center (L-DAWA) or a common direction of centers (EUA) means nothing.

`centers_used` is measured, not trained: exp of the entropy of how often each center is the nearest of an online sample.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedssl.artifacts.tensors import Tensors
from fedssl.errors import MethodError
from fedssl.losses import crossed_kl, student_t_assignment
from fedssl.methods.api import Batch, Context, Terms, Update
from fedssl.methods.composition.part import Online, Part, Wire
from fedssl.methods.composition.weighting import mean_of, update_weights
from fedssl.protocol.methods.add_ons import CrossedKLConfig
from fedssl.unit_vectors import unit

CENTERS = "centers"
_MU = f"{CENTERS}.mu"


class Centers(nn.Module):
    """Cluster centers mu (M, D), and the soft assignment to them."""

    def __init__(self, config: CrossedKLConfig, width: int) -> None:
        super().__init__()
        self._exponent = config.exponent
        self._unit = config.scale == "unit"
        mu_MD = torch.randn(config.num_centers, width)
        self.mu = nn.Parameter(F.normalize(mu_MD, dim=1) if self._unit else mu_MD)

    def embed(self, z_BD: Tensor) -> Tensor:
        """Return z at the scale at which it is compared with the centers."""
        return unit(z_BD.float()) if self._unit else z_BD

    def forward(self, z_BD: Tensor) -> Tensor:
        """Return q (B, M)."""
        return student_t_assignment(self.embed(z_BD), self.mu, self._exponent)


@dataclass(frozen=True)
class CrossedKL(Part):
    """Pull each view's assignments towards the other view's target distribution."""

    config: CrossedKLConfig

    shared: ClassVar[tuple[str, ...]] = (CENTERS,)

    def heads(self, modules: nn.ModuleDict, ctx: Context) -> dict[str, nn.Module]:
        projector = ctx.spec.model.projector
        if projector is None:
            raise MethodError("crossed_kl needs a projector")  # the spec's check refuses this earlier
        return {CENTERS: Centers(self.config, projector.out_dim)}

    def terms(self, online: Online, modules: nn.ModuleDict, batch: Batch, ctx: Context) -> Terms:
        centers = modules[CENTERS]
        with torch.no_grad():
            target_a, target_b = (centers(t) for t in online.targets)
        online_a, online_b = (centers(p) for p in online.predicted)
        loss = self.config.weight * crossed_kl(online_a, online_b, target_a, target_b)
        return {"crossed_kl": loss}, {"centers_used": num_used(torch.cat([online_a, online_b]))}

    @property
    def wire(self) -> Wire:
        return Wire(kinds={CENTERS: "centers"}, combines=(CENTERS,), aggregate=self._aggregate)

    def _aggregate(self, state: Tensors, updates: Sequence[Update], ctx: Context) -> Tensors:
        sent = [_centers(update) for update in updates]
        if not all(sent):  # every client trains by itself and sends nothing
            return {}
        return mean_of(sent, update_weights(updates, ctx), state, ctx)


def _centers(update: Update) -> Tensors:
    """Return a copy of an update's centers, or nothing if it has none. A view would keep the whole update in memory."""
    tensors = update.load()
    return {_MU: tensors[_MU].clone()} if _MU in tensors else {}


@torch.no_grad()
def num_used(q_BM: Tensor) -> Tensor:
    """Return exp(entropy) of the shares of samples by their nearest center: 1 to M."""
    counts_M = torch.zeros_like(q_BM[0]).scatter_add_(0, q_BM.argmax(dim=1), torch.ones_like(q_BM[:, 0]))
    shares_M = counts_M / len(q_BM)
    entropy: Tensor = torch.special.entr(shares_M).sum()
    return entropy.exp()
