"""Configs of the add-ons: loss terms and corrections that go onto any objective they are defined for."""

from typing import Annotated, Literal

from pydantic import Field

from fedssl.protocol.methods.parts import PartConfig


class ProximalConfig(PartConfig):
    """FedProx: stay close to the global weights (Li et al. 2020, Eq. 2)."""

    name: Literal["proximal"] = "proximal"
    mu: float = Field(
        default=0.01, ge=0, le=1000, description="mu of (mu/2)||w - w_g||^2. FLESD's code has no 1/2: halve its mu."
    )


AnyAddOn = Annotated[ProximalConfig, Field(discriminator="name")]
