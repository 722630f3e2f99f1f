"""Config of supervised FedAvg."""

from typing import ClassVar, Literal

from pydantic import Field

from fedssl.protocol.methods.base import MethodInfo
from fedssl.protocol.methods.composed import ComposedConfig
from fedssl.protocol.methods.parts import Trait


class SupervisedConfig(ComposedConfig):
    """FedAvg of cross-entropy: the upper baseline, for clients whose images are labelled."""

    info: ClassVar[MethodInfo] = MethodInfo(
        title="Supervised FedAvg",
        paper="McMahan et al. 2017, Communication-Efficient Learning of Deep Networks from Decentralized Data",
        equations="Algorithm 1 with cross-entropy",
        leaves_the_client="weights of encoder and classifier",
        stays_on_the_client="nothing between rounds",
    )

    traits: ClassVar[frozenset[Trait]] = frozenset({"labels"})

    name: Literal["supervised"] = "supervised"
    num_classes: int = Field(default=10, ge=2, le=100_000, description="Classes of the labels.")
