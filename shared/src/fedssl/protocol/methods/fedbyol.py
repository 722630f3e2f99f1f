"""Config of FedBYOL."""

from typing import ClassVar, Literal

from pydantic import Field

from fedssl.protocol.methods.base import MethodInfo
from fedssl.protocol.methods.composed import ComposedConfig
from fedssl.protocol.methods.parts import Trait


class BYOLConfig(ComposedConfig):
    """The objective of FedBYOL, FedU, FedEMA and FedRLC."""

    traits: ClassVar[frozenset[Trait]] = frozenset({"views", "projector", "predictor", "target"})

    target_momentum: float = Field(
        default=0.99, ge=0, le=1, description="m of target = m target + (1 - m) online, after every step."
    )


class FedBYOLConfig(BYOLConfig):
    """FedAvg of BYOL: online network and predictor are averaged, the target network stays with its client."""

    info: ClassVar[MethodInfo] = MethodInfo(
        title="FedBYOL",
        paper="Grill et al. 2020, Bootstrap Your Own Latent; federated as in FedU (Zhuang et al. 2021)",
        equations="BYOL Eq. 2, symmetrised",
        leaves_the_client="weights of online encoder, projector and predictor",
        stays_on_the_client="the target network (encoder and projector)",
    )

    name: Literal["fedbyol"] = "fedbyol"
