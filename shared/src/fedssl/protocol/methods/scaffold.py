"""SCAFFOLD on FedSimCLR: FedSimCLR with the add-on `scaffold`, which goes onto any other method too.

Karimireddy et al. 2020; equations, variants and deviations are in the module `add_ons.scaffold`. FedX's Table 2 puts
SCAFFOLD onto local distillation: `fedx` without its global terms, with this add-on.
"""

from typing import ClassVar, Literal

from pydantic import Field

from fedssl.protocol.methods.add_ons import AnyAddOn, ScaffoldConfig
from fedssl.protocol.methods.base import MethodInfo
from fedssl.protocol.methods.fedsimclr import FedSimCLRConfig


class ScaffoldMethodConfig(FedSimCLRConfig):
    """FedSimCLR with control variates."""

    info: ClassVar[MethodInfo] = MethodInfo(
        title="SCAFFOLD",
        paper="Karimireddy et al. 2020, SCAFFOLD: Stochastic Controlled Averaging for Federated Learning; on SimCLR",
        equations="SCAFFOLD Algorithm 1 with option II, FedX Eq. 2",
        leaves_the_client="weights of encoder and projector, and how its control variate changed",
        stays_on_the_client="its control variate",
    )

    name: Literal["scaffold"] = "scaffold"  # type: ignore[assignment]
    add_ons: tuple[AnyAddOn, ...] = Field(
        default=(ScaffoldConfig(),), description="Control variates; they go onto any other method too."
    )
