"""Config of FedBarlow."""

from typing import ClassVar, Literal

from pydantic import Field

from fedssl.protocol.methods.base import MethodInfo
from fedssl.protocol.methods.composed import ComposedConfig
from fedssl.protocol.methods.parts import Trait


class FedBarlowConfig(ComposedConfig):
    """FedAvg of Barlow Twins: the cross-correlation of two views' embeddings becomes the identity."""

    info: ClassVar[MethodInfo] = MethodInfo(
        title="FedBarlow",
        paper="Zbontar et al. 2021, Barlow Twins: Self-Supervised Learning via Redundancy Reduction",
        equations="Eq. 1 and 2",
        leaves_the_client="weights of encoder and projector",
        stays_on_the_client="nothing between rounds",
    )

    traits: ClassVar[frozenset[Trait]] = frozenset({"views", "projector", "symmetric", "dimensions"})

    name: Literal["fedbarlow"] = "fedbarlow"
    off_diagonal_weight: float = Field(
        default=0.0051, ge=0, le=1e6, description="lambda of Eq. 1: the weight of the off-diagonal terms."
    )
