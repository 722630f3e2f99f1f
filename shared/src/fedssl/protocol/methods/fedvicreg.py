"""Config of FedVICReg."""

from typing import ClassVar, Literal

from pydantic import Field

from fedssl.protocol.methods.base import MethodInfo
from fedssl.protocol.methods.composed import ComposedConfig
from fedssl.protocol.methods.parts import Trait
from fedssl.protocol.model import ModelConfig


class FedVICRegConfig(ComposedConfig):
    """FedAvg of VICReg: views agree, every dimension varies, and no two dimensions vary together."""

    info: ClassVar[MethodInfo] = MethodInfo(
        title="FedVICReg",
        paper="Bardes et al. 2022, VICReg: Variance-Invariance-Covariance Regularization for Self-Supervised Learning",
        equations="Eq. 1 to 6",
        leaves_the_client="weights of encoder and projector",
        stays_on_the_client="nothing between rounds",
    )

    traits: ClassVar[frozenset[Trait]] = frozenset({"views", "projector", "symmetric", "dimensions"})

    name: Literal["fedvicreg"] = "fedvicreg"
    invariance_weight: float = Field(
        default=25.0, ge=0, le=1e6, description="lambda of Eq. 6: the weight of the distance of two views."
    )
    variance_weight: float = Field(
        default=25.0, ge=0, le=1e6, description="mu of Eq. 6: the weight of deviations below 1 over the batch."
    )
    covariance_weight: float = Field(
        default=1.0, ge=0, le=1e6, description="nu of Eq. 6: the weight of covariances between dimensions."
    )
    variant: Literal["reference", "paper"] = Field(
        default="reference",
        description="`reference` is VICReg's code, for which its weights were chosen: the distance is a mean over the "
        "dimensions, and the variance terms of the two views are averaged. `paper` is Eq. 1 to 6 as printed: both are "
        "sums, so the distance weighs as many times more as there are dimensions.",
    )

    def check(self, model: ModelConfig) -> None:
        super().check(model)
        if not (self.invariance_weight or self.variance_weight or self.covariance_weight):
            raise ValueError("all three weights of fedvicreg are 0, so there is no loss: set one of them above 0")
