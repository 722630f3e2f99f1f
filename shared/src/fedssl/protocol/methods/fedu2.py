"""Config of FedU2."""

from typing import ClassVar, Literal

from pydantic import Field

from fedssl.protocol.methods.add_ons import AnyAddOn, FURConfig
from fedssl.protocol.methods.base import MethodInfo
from fedssl.protocol.methods.fedalignuniform import FedAlignUniformConfig
from fedssl.protocol.methods.reducers import AnyReducer, EUAConfig


class FedU2Config(FedAlignUniformConfig):
    """FedAlignUniform with FedU2's regulariser on the clients and its aggregation on the coordinator."""

    info: ClassVar[MethodInfo] = MethodInfo(
        title="FedU2",
        paper="Liao et al. 2024, Rethinking the Representation in Federated Unsupervised Learning with Non-IID Data; "
        "on alignment and uniformity as in SSD (Fang et al. 2025)",
        equations="FedU2's FUR and EUA as its code has them, SSD Eq. 3 and 4",
        leaves_the_client="weights of encoder and projector",
        stays_on_the_client="nothing between rounds",
    )

    name: Literal["fedu2"] = "fedu2"  # type: ignore[assignment]
    add_ons: tuple[AnyAddOn, ...] = Field(
        default=(FURConfig(),),
        description="FUR; put it onto fedsimclr at temperature 0.07 for FedU2's own experiments.",
    )
    reducer: AnyReducer = Field(default=EUAConfig(), description="EUA; its server_learning_rate must suit the model.")
