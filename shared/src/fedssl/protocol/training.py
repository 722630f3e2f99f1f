"""How a client trains and which clients take part."""

from fractions import Fraction
from math import ceil
from typing import Annotated, Literal

from pydantic import Field, model_validator

from fedssl.protocol.base import ClientId, StrictModel


class OptimizerConfig(StrictModel):
    """The local optimiser. Each round creates a new one, so momentum does not last longer than a round."""

    name: Literal["sgd", "adam", "adamw"] = "sgd"
    learning_rate: float = Field(default=0.05, gt=0, le=100)
    momentum: float = Field(default=0.9, ge=0, lt=1, description="SGD only.")
    weight_decay: float = Field(default=1e-4, ge=0, le=1)
    schedule: Literal["constant", "cosine"] = Field(
        default="constant", description="Over rounds: `cosine` is lr/2 (1 + cos(pi r/R)), constant inside round r of R."
    )


class TrainingConfig(StrictModel):
    """One client's work in one round."""

    local_epochs: int = Field(default=1, ge=0, le=10_000)
    batch_size: int = Field(default=128, ge=2, le=65_536)
    drop_last: bool = Field(
        default=True, description="Drop an incomplete last batch; a client's only batch is never dropped."
    )
    precision: Literal["fp32", "bf16"] = Field(
        default="fp32",
        description="bf16 runs the network in autocast; losses and normalisations stay fp32. fp32 is exact, also on a "
        "GPU: no TF32.",
    )
    gpu_steps: Literal["auto", "eager", "recorded", "compiled"] = Field(
        default="auto",
        description="How a GPU runs its steps. `eager`: one kernel after the other; `recorded`: as a CUDA graph; "
        "`compiled`: by torch.compile first, which takes about a minute; `auto`: compiled in long runs if a C "
        "compiler is installed and all clients share the result, otherwise recorded. A CPU's steps are eager.",
    )
    optimizer: OptimizerConfig = OptimizerConfig()


class CohortConfig(StrictModel):
    """Which clients take part, and what happens when some do not deliver."""

    clients: tuple[ClientId, ...] | None = Field(
        default=None, description="The run's clients. Null: every client that is registered and not revoked."
    )
    min_clients: int = Field(default=1, ge=1, le=100_000, description="The first round waits for this many clients.")
    fraction: float = Field(default=1.0, gt=0, le=1, description="Share of the clients sampled each round.")
    over_sampling: float = Field(
        default=1.0,
        ge=1,
        le=100,
        description="Sample this many times as many clients as `fraction` needs. The round closes after the number of "
        "updates that `fraction` needs; later updates do not count.",
    )
    min_updates: int | None = Field(
        default=None,
        ge=1,
        description="Smallest number of updates with which a round may close. Null: those of the whole cohort, except "
        "clients that were revoked or over-sampled. A round waits until a cohort is that large.",
    )
    deadline_seconds: float = Field(default=3600, gt=0, le=30 * 86_400, description="From the round's opening.")
    lease_seconds: float = Field(
        default=60, ge=2, le=86_400, description="A client that sends no heartbeat for this long is considered gone."
    )
    max_attempts: int = Field(
        default=3, ge=1, le=1000, description="Attempts of one round: without enough updates it is offered again."
    )
    without_quorum: Literal["fail", "skip"] = Field(
        default="fail", description="After the last attempt: end the run as failed, or close the round as skipped."
    )
    on_lost_state: Literal["continue", "pause"] = Field(
        default="continue",
        exclude_if=lambda it: it == "continue",
        description="If a client's state is missing or damaged: the client starts cold, with the method's own repair, "
        "or the run pauses first, so that the state can be restored from a backup.",
    )

    @model_validator(mode="after")
    def _possible(self) -> "CohortConfig":
        if self.clients is not None:
            if not self.clients:
                raise ValueError("cohort.clients is empty: name the clients, or leave it out for all of them")
            if len(set(self.clients)) != len(self.clients):
                raise ValueError("cohort.clients names a client twice")
            if self.min_clients > len(self.clients):
                raise ValueError("cohort.min_clients is larger than the list cohort.clients: no round could open")
            if (self.min_updates or 0) > (size := self.num_wanted(len(self.clients))):
                raise ValueError(
                    f"cohort.min_updates is {self.min_updates}, but a round wants {size} of the {len(self.clients)} "
                    f"clients (cohort.fraction {self.fraction}): none could ever close; lower it, or raise the fraction"
                )
        return self

    def num_wanted(self, num_clients: int) -> int:
        """How many updates a round closes with: `fraction` of the clients, rounded half up, and at least one."""
        # The fraction as it was written: in binary 0.29 * 50 is a little less than 14.5.
        return max(1, int(Fraction(str(self.fraction)) * num_clients + Fraction(1, 2)))

    def num_asked(self, num_clients: int) -> int:
        """How many clients a round is offered to: `over_sampling` times as many, if there are."""
        return min(num_clients, ceil(Fraction(str(self.over_sampling)) * self.num_wanted(num_clients)))


Seed = Annotated[int, Field(ge=0, lt=2**63)]
