"""FedBarlow: FedAvg of Barlow Twins.

Zbontar et al. 2021, Eq. 1 and 2: L = sum_i (1 - C_ii)^2 + lambda sum_{i != j} C_ij^2, with lambda
`off_diagonal_weight`. As in the authors' code, each view passes the network as a batch of its own.

Deviation: the projector comes from the run's model config; the paper's is 8192(BN, ReLU)-8192(BN, ReLU)-8192, and it
trains with LARS. The loss is a sum over the dimensions, so a wider projector wants a smaller learning rate.
Correlations are those of the client's own batch: none of them leaves it.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from fedssl.losses import barlow_twins
from fedssl.methods.api import Batch, Context, Terms
from fedssl.methods.composition.part import Objective, Online
from fedssl.protocol.methods.fedbarlow import FedBarlowConfig


@dataclass(frozen=True)
class BarlowTwins(Objective):
    """Make the cross-correlation of two views' embeddings the identity."""

    config: FedBarlowConfig

    joint_forward: ClassVar[bool] = False

    def terms(self, online: Online, modules: nn.ModuleDict, batch: Batch, ctx: Context) -> Terms:
        z1, z2 = online.z
        return {"barlow_twins": barlow_twins(z1, z2, off_diagonal=self.config.off_diagonal_weight)}, {}
