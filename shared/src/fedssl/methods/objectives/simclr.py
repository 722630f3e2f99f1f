"""FedSimCLR: FedAvg of SimCLR.

Chen et al. 2020; federated as in FedX (Han et al. 2022), whose Eq. 2 is the loss: NT-Xent over both views as anchors,
self excluded, the positive in the denominator. tau is `temperature`.

Deviation: EasyFL uses temperature 0.07 and a wider projector; FedX's tables use 0.1, the default here.
"""

from dataclasses import dataclass

from torch import nn

from fedssl.losses import nt_xent
from fedssl.methods.api import Batch, Context, Terms
from fedssl.methods.composition.part import Objective, Online
from fedssl.protocol.methods.fedsimclr import FedSimCLRConfig


@dataclass(frozen=True)
class SimCLR(Objective):
    """NT-Xent between two views."""

    config: FedSimCLRConfig

    def terms(self, online: Online, modules: nn.ModuleDict, batch: Batch, ctx: Context) -> Terms:
        return {"nt_xent": nt_xent(online.z[0], online.z[1], self.config.temperature)}, {}
