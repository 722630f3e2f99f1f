"""Config of FedDINO."""

from typing import ClassVar, Literal

from pydantic import Field

from fedssl.protocol.methods.base import MethodInfo
from fedssl.protocol.methods.composed import ComposedConfig
from fedssl.protocol.methods.fedbyol import require_constant_momentum
from fedssl.protocol.methods.parts import Trait


class FedDINOConfig(ComposedConfig):
    """FedAvg of DINO: the student is averaged, its teacher and the center stay with the client."""

    info: ClassVar[MethodInfo] = MethodInfo(
        title="FedDINO",
        paper="Caron et al. 2021, Emerging Properties in Self-Supervised Vision Transformers",
        equations="Eq. 2 to 4 and Algorithm 1",
        leaves_the_client="weights of the student's encoder, projector and prototypes",
        stays_on_the_client="the teacher (encoder, projector and prototypes) and the center of its outputs",
    )

    traits: ClassVar[frozenset[Trait]] = frozenset({"views", "projector", "prototypes"})
    takes_local_crops: ClassVar[bool] = True

    name: Literal["feddino"] = "feddino"
    num_prototypes: int = Field(
        default=1024, ge=2, le=1_000_000, description="K, the dimensions of the distributions (DINO: 65536)."
    )
    student_temperature: float = Field(default=0.1, gt=0, le=100, description="tau_s (DINO: 0.1).")
    teacher_temperature: float = Field(
        default=0.07, gt=0, le=100, description="tau_t after its warm-up (DINO: 0.07). A lower one sharpens more."
    )
    first_teacher_temperature: float = Field(
        default=0.04, gt=0, le=100, description="tau_t in the first round of its warm-up (DINO: 0.04)."
    )
    temperature_warmup_rounds: int = Field(
        default=30,
        ge=0,
        le=100_000,
        description="tau_t goes linearly from `first_teacher_temperature` to `teacher_temperature` over this many "
        "rounds (DINO: 30 epochs). It is constant inside a round.",
    )
    center_momentum: float = Field(
        default=0.9, ge=0, le=1, description="m of Eq. 4: center = m center + (1 - m) mean of the teacher's outputs."
    )
    target_momentum: float = Field(
        default=0.996, ge=0, le=1, description="lambda of teacher = lambda teacher + (1 - lambda) student, per step."
    )
    target_momentum_schedule: Literal["constant", "cosine"] = Field(
        default="cosine", description="`cosine`: lambda grows to 1 in each step of the whole run (DINO)."
    )
    num_frozen_rounds: int = Field(
        default=1,
        ge=0,
        le=100_000,
        description="First rounds in which the prototypes are not trained, which stabilises them (DINO: the first "
        "epoch).",
    )

    def teacher_temperature_in(self, round_number: int) -> float:
        """Return tau_t in a round, counted from 1.

        >>> config = FedDINOConfig(temperature_warmup_rounds=4)
        >>> [round(config.teacher_temperature_in(number), 3) for number in (1, 2, 4, 5)]
        [0.04, 0.05, 0.07, 0.07]
        """
        num_rounds, first, last = (
            self.temperature_warmup_rounds,
            self.first_teacher_temperature,
            self.teacher_temperature,
        )
        if round_number > num_rounds:
            return last
        return first + (last - first) * (round_number - 1) / max(num_rounds - 1, 1)

    def check_continuation(self, num_rounds: int, total: int) -> None:
        super().check_continuation(num_rounds, total)
        require_constant_momentum(self.target_momentum_schedule, num_rounds, total)
