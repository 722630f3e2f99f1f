"""FedSimSiam: FedAvg of SimSiam.

Chen & He 2021, Eq. 1 and 2: L = -cos(p1, sg z2) / 2 - cos(p2, sg z1) / 2, with z the projector's output and p the
predictor's; encoder, projector and predictor are averaged and overwrite the client's, as in FedU's comparison (Zhuang
et al. 2021) and EasyFL's code, whose predictor is not a bottleneck: both heads are 4096(BN, ReLU)-2048 there.

Cold start: nothing is kept.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from fedssl.losses import negative_cosine
from fedssl.methods.api import Batch, Context, Terms
from fedssl.methods.composition.part import PREDICTOR, PROJECTOR, Objective, Online
from fedssl.models import build_mlp
from fedssl.protocol.methods.fedsimsiam import FedSimSiamConfig


@dataclass(frozen=True)
class SimSiam(Objective):
    """Predict the same network's embedding of the other view."""

    config: FedSimSiamConfig

    shared: ClassVar[tuple[str, ...]] = (PROJECTOR, PREDICTOR)
    joint_forward: ClassVar[bool] = False

    def heads(self, modules: nn.ModuleDict, ctx: Context) -> dict[str, nn.Module]:
        width = self.config.embedding_width(ctx.spec.model)
        return {PREDICTOR: build_mlp(ctx.spec.model.predictor, width, width)}

    def terms(self, online: Online, modules: nn.ModuleDict, batch: Batch, ctx: Context) -> Terms:
        z1, z2 = online.z
        p1, p2 = (modules[PREDICTOR](z) for z in online.z)
        return {"negative_cosine": (negative_cosine(p1, z2) + negative_cosine(p2, z1)) / 2}, {}
