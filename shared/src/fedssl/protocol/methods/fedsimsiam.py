"""Config of FedSimSiam."""

from typing import ClassVar, Literal

from fedssl.protocol.methods.base import MethodInfo
from fedssl.protocol.methods.composed import ComposedConfig
from fedssl.protocol.methods.parts import Trait


class FedSimSiamConfig(ComposedConfig):
    """FedAvg of SimSiam: the other view is the target, through a stopped gradient."""

    info: ClassVar[MethodInfo] = MethodInfo(
        title="FedSimSiam",
        paper="Chen & He 2021, Exploring Simple Siamese Representation Learning; federated as in FedU (Zhuang et al. "
        "2021)",
        equations="SimSiam Eq. 1 and 2",
        leaves_the_client="weights of encoder, projector and predictor",
        stays_on_the_client="nothing between rounds",
    )

    traits: ClassVar[frozenset[Trait]] = frozenset({"views", "projector", "predictor"})

    name: Literal["fedsimsiam"] = "fedsimsiam"
