"""Config of FedAlignUniform."""

from typing import ClassVar, Literal

from pydantic import Field

from fedssl.protocol.methods.base import MethodInfo
from fedssl.protocol.methods.composed import ComposedConfig
from fedssl.protocol.methods.parts import Trait


class FedAlignUniformConfig(ComposedConfig):
    """FedAvg of alignment and uniformity, the base that SSD builds on."""

    info: ClassVar[MethodInfo] = MethodInfo(
        title="FedAlignUniform",
        paper="Wang & Isola 2020, Understanding Contrastive Representation Learning through Alignment and Uniformity; "
        "federated as in SSD (Fang et al. 2025)",
        equations="SSD Eq. 3 and 4",
        leaves_the_client="weights of encoder and projector",
        stays_on_the_client="nothing between rounds",
    )

    traits: ClassVar[frozenset[Trait]] = frozenset({"views", "projector", "symmetric"})

    name: Literal["fedalignuniform"] = "fedalignuniform"
    uniformity_weight: float = Field(default=1.0, ge=0, le=1000, description="Weight of uniformity against alignment.")
    views: Literal["joint", "separate"] = Field(
        default="joint",
        exclude_if=lambda it: it == "joint",
        description="How the two views of an image pass the networks: as one batch with common BatchNorm statistics, "
        "or one after the other (SSD's code).",
    )
    uniformity_t: float = Field(default=2.0, gt=0, le=100, description="t of exp(-t d^2).")
