"""FedSimCLR: FedAvg of SimCLR.

Chen et al. 2020; federated as in FedX (Han et al. 2022), whose Eq. 2 is the loss: NT-Xent over both views as anchors,
self excluded, the positive in the denominator. tau is `temperature`.

With `data.local_crops` the loss is SimCLR's over all views and crops of an image, as SwAV's authors define it (Caron et
al. 2020, Appendix A.8, Eq. 7): each two of them are a positive pair, whose negatives are all views and crops of the
other images.

Deviation: EasyFL uses temperature 0.07 and a wider projector; FedX's tables use 0.1, the default here.
"""

from dataclasses import dataclass

from torch import nn

from fedssl.losses import multi_crop_nt_xent, nt_xent
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
        if crops := embed_local(modules, batch):
            return {"nt_xent": multi_crop_nt_xent([z1, z2, *crops], self.config.temperature)}, {}
        return {"nt_xent": nt_xent(z1, z2, self.config.temperature)}, {}
