"""FedAlignUniform: FedAvg of alignment and uniformity, the base of SSD.

Wang & Isola 2020; federated as in SSD (Fang et al. 2025), Eq. 3 (alignment) and Eq. 4 (uniformity):
L = La + w * (Lu(z1) + Lu(z2)) / 2, with w `uniformity_weight` and t `uniformity_t`.

Deviation: SSD prints Eq. 4 with a minus sign; as in its code, Lu is minimised as +log E exp(-t d^2). The projector
comes from the run's model config; SSD's own is 512-2048(BN, ReLU)-512. How the two views pass the
network is not in the paper: `views` "joint", the default, is one pass, as in FedX, and faster; "separate" is what SSD's
code does.
"""

from dataclasses import dataclass

from torch import nn

from fedssl.losses import alignment, uniformity
from fedssl.methods.api import Batch, Context, Terms
from fedssl.methods.composition.part import Objective, Online
from fedssl.protocol.methods.fedalignuniform import FedAlignUniformConfig


@dataclass(frozen=True)
class AlignUniform(Objective):
    """Views of one image close together, images spread over the sphere."""

    config: FedAlignUniformConfig

    def is_joint(self) -> bool:
        return self.config.views == "joint"

    def terms(self, online: Online, modules: nn.ModuleDict, batch: Batch, ctx: Context) -> Terms:
        z1, z2 = online.z
        t, weight = self.config.uniformity_t, self.config.uniformity_weight
        return {
            "alignment": alignment(z1, z2),
            "uniformity": weight * (uniformity(z1, t=t) + uniformity(z2, t=t)) / 2,
        }, {}
