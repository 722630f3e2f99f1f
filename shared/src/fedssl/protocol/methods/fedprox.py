"""FedProx on FedSimCLR: FedSimCLR with the add-on `proximal`, which goes onto any other method too.

Li et al. 2020; the equation and the deviations are in the module `add_ons.proximal`. FLESD's baseline searches mu among
0.001, 0.01, 0.1 and 1 without the 1/2: double those.
"""

from typing import ClassVar, Literal

from pydantic import Field

from fedssl.protocol.methods.add_ons import AnyAddOn, ProximalConfig
from fedssl.protocol.methods.base import MethodInfo
from fedssl.protocol.methods.fedsimclr import FedSimCLRConfig


class FedProxConfig(FedSimCLRConfig):
    """FedSimCLR with a pull towards the global weights."""

    info: ClassVar[MethodInfo] = MethodInfo(
        title="FedProx",
        paper="Li et al. 2020, Federated Optimization in Heterogeneous Networks; on SimCLR",
        equations="FedProx Eq. 2, FedX Eq. 2",
        leaves_the_client="weights of encoder and projector",
        stays_on_the_client="nothing between rounds",
    )

    name: Literal["fedprox"] = "fedprox"  # type: ignore[assignment]
    add_ons: tuple[AnyAddOn, ...] = Field(
        default=(ProximalConfig(),), description="The proximal term; it goes onto any other method too."
    )
