"""Config of FedBYOL."""

from typing import ClassVar, Literal

from pydantic import Field

from fedssl.protocol.methods.base import MethodInfo
from fedssl.protocol.methods.composed import ComposedConfig
from fedssl.protocol.methods.parts import Trait


class BYOLConfig(ComposedConfig):
    """The objective of FedBYOL, FedU, FedEMA and FedRLC."""

    traits: ClassVar[frozenset[Trait]] = frozenset({"views", "projector", "predictor", "target"})
    takes_local_crops: ClassVar[bool] = True

    target_momentum: float = Field(
        default=0.99, ge=0, le=1, description="m of target = m target + (1 - m) online, after every step."
    )
    target_momentum_schedule: Literal["constant", "cosine"] = Field(
        default="constant",
        exclude_if=lambda it: it == "constant",
        description="`cosine`: the momentum grows from `target_momentum` to 1 in each step of the whole run (BYOL).",
    )

    def check_continuation(self, num_rounds: int, total: int) -> None:
        super().check_continuation(num_rounds, total)
        require_constant_momentum(self.target_momentum_schedule, num_rounds, total)


def require_constant_momentum(schedule: str, num_rounds: int, total: int) -> None:
    """Raise ValueError if the target's momentum depends on how many rounds the run has."""
    if schedule != "constant":
        raise ValueError(
            f'method.target_momentum_schedule = "{schedule}" ends with the last of {num_rounds} rounds, and would be '
            f"different over {total}"
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
