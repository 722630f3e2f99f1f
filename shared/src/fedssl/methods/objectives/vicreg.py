"""FedVICReg: FedAvg of VICReg.

Bardes et al. 2022, Eq. 1 to 6: L = lambda s(Z, Z') + mu (v(Z) + v(Z')) + nu (c(Z) + c(Z')), with lambda
`invariance_weight`, mu `variance_weight` and nu `covariance_weight`. As in the authors' code, each view passes the
network as a batch of its own. `variant` chooses between the printed scales and the code's.

Deviation: the projector comes from the run's model config; VICReg's own is 8192(BN, ReLU)-8192(BN, ReLU)-8192.
Statistics are those of the client's own batch: none of them leaves it.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from fedssl.losses import vicreg
from fedssl.methods.api import Batch, Context, Terms
from fedssl.methods.composition.part import Objective, Online
from fedssl.protocol.methods.fedvicreg import FedVICRegConfig


@dataclass(frozen=True)
class VICReg(Objective):
    """Views of one image close together, dimensions that vary and do not repeat one another."""

    config: FedVICRegConfig

    joint_forward: ClassVar[bool] = False

    def terms(self, online: Online, modules: nn.ModuleDict, batch: Batch, ctx: Context) -> Terms:
        config, (z1, z2) = self.config, online.z
        loss = vicreg(
            z1,
            z2,
            invariance=config.invariance_weight,
            variance=config.variance_weight,
            covariance=config.covariance_weight,
            variant=config.variant,
        )
        return {"vicreg": loss}, {}
