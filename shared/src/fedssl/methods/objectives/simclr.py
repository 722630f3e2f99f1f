"""FedSimCLR: FedAvg of SimCLR.

Chen et al. 2020; federated as in FedX (Han et al. 2022), whose Eq. 2 is the loss: NT-Xent over both views as anchors,
self excluded, the positive in the denominator. tau is `temperature`.

With `data.local_crops` the loss is the mean of NT-Xent over the pairs of a view and another view or a smaller crop, as
multi-crop is used with SimCLR in SwAV (Caron et al. 2020, Figure 3); there is no pair of two crops.

Deviation: EasyFL uses temperature 0.07 and a wider projector; FedX's tables use 0.1, the default here.
"""

from dataclasses import dataclass

import torch
from torch import nn

from fedssl.losses import nt_xent
from fedssl.methods.api import Batch, Context, Terms
from fedssl.methods.composition.modules import embed_local
from fedssl.methods.composition.part import Objective, Online
from fedssl.protocol.methods.fedsimclr import FedSimCLRConfig


@dataclass(frozen=True)
class SimCLR(Objective):
    """NT-Xent between two views."""

    config: FedSimCLRConfig

    def terms(self, online: Online, modules: nn.ModuleDict, batch: Batch, ctx: Context) -> Terms:
        z1, z2 = online.z
        pairs = [(z1, z2), *((z, other) for other in embed_local(modules, batch) for z in (z1, z2))]
        losses = [nt_xent(z, other, self.config.temperature) for z, other in pairs]
        return {"nt_xent": losses[0] if len(losses) == 1 else torch.stack(losses).mean()}, {}
