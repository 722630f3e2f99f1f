"""FedX as its paper runs it by default: FedSimCLR with cross knowledge distillation.

Han et al. 2022, Eq. 2 and 6-13. The objective is FedSimCLR's, the rest is the add-on `fedx`, which goes onto other
objectives too:

    method = {name = "fedbyol", add_ons = [{name = "fedx"}]}

The paper's setting besides the defaults: ResNet-18, projector 512-256(ReLU)-256 without BatchNorm, SGD 0.01 with
momentum 0.9 and weight decay 1e-5, 100 rounds of 10 epochs, `batch_size` 64 (see the add-on), weak augmentation.
"""

from typing import ClassVar, Literal

from pydantic import Field

from fedssl.protocol.methods.add_ons import AnyAddOn, FedXConfig
from fedssl.protocol.methods.base import MethodInfo
from fedssl.protocol.methods.fedsimclr import FedSimCLRConfig
from fedssl.protocol.model import ModelConfig


class FedXMethodConfig(FedSimCLRConfig):
    """FedSimCLR with FedX's local and global distillation."""

    info: ClassVar[MethodInfo] = MethodInfo(
        title="FedX",
        paper="Han et al. 2022, FedX: Unsupervised Federated Learning with Cross Knowledge Distillation",
        equations="FedX Eq. 2 and 6-13",
        leaves_the_client="weights of encoder, projector and FedX's predictor",
        stays_on_the_client="nothing between rounds",
    )

    name: Literal["fedx"] = "fedx"  # type: ignore[assignment]
    add_ons: tuple[AnyAddOn, ...] = Field(
        default=(FedXConfig(),), description="Loss terms and corrections on top of SimCLR; `fedx` is one of them."
    )

    def check(self, model: ModelConfig) -> None:
        super().check(model)
        if not any(isinstance(add_on, FedXConfig) for add_on in self.add_ons):
            raise ValueError(
                "method fedx without the add-on fedx is fedsimclr: use fedsimclr, or add fedx to method.add_ons"
            )
