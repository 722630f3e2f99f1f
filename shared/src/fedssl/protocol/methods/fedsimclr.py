"""Config of FedSimCLR."""

from typing import ClassVar, Literal

from pydantic import Field

from fedssl.protocol.methods.base import MethodInfo
from fedssl.protocol.methods.composed import ComposedConfig
from fedssl.protocol.methods.parts import Trait


class FedSimCLRConfig(ComposedConfig):
    """FedAvg of SimCLR."""

    info: ClassVar[MethodInfo] = MethodInfo(
        title="FedSimCLR",
        paper="Chen et al. 2020, A Simple Framework for Contrastive Learning of Visual Representations; "
        "federated as in FedX (Han et al. 2022)",
        equations="FedX Eq. 2 (NT-Xent)",
        leaves_the_client="weights of encoder and projector",
        stays_on_the_client="nothing between rounds",
    )

    traits: ClassVar[frozenset[Trait]] = frozenset({"views", "projector", "symmetric"})
    takes_local_crops: ClassVar[bool] = True

    name: Literal["fedsimclr"] = "fedsimclr"
    temperature: float = Field(
        default=0.1, gt=0, le=100, description="Temperature of NT-Xent: FedX's tables use 0.1, EasyFL 0.07."
    )
