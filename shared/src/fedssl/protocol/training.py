"""How a client trains and which clients take part."""

import math
from fractions import Fraction
from typing import Annotated, Literal

from pydantic import Field, model_validator

from fedssl.protocol.base import ClientId, StrictModel


class OptimizerConfig(StrictModel):
    """The local optimiser. Each round creates a new one, so momentum does not last longer than a round."""

    name: Literal["sgd", "adam", "adamw", "lars"] = Field(
        default="sgd",
        description="`lars` is SGD whose step of each weight is scaled to the weight's length, for large batches (You "
        "et al. 2017).",
    )
    learning_rate: float = Field(default=0.05, gt=0, le=100)
    momentum: float = Field(default=0.9, ge=0, lt=1, description="SGD and LARS only.")
    weight_decay: float = Field(default=1e-4, ge=0, le=1)
    schedule: Literal["constant", "cosine", "cosine_per_step"] = Field(
        default="constant",
        description="`cosine` is lr/2 (1 + cos(pi r/R)), constant inside round r of R, counted from 0. "
        "`cosine_per_step` follows the cosine in each step, from the end of the warm-up to the end of the run.",
    )
    warmup_rounds: float = Field(
        default=0.0,
        ge=0,
        le=100_000,
        exclude_if=lambda it: it == 0,
        description="The learning rate grows in each step, linearly from 0, over this many rounds. With `constant` and "
        "`cosine_per_step`.",
    )
    final_learning_rate: float = Field(
        default=0.0,
        ge=0,
        le=100,
        exclude_if=lambda it: it == 0,
        description="`cosine_per_step` only: the learning rate at the end of the run.",
    )
    final_weight_decay: float | None = Field(
        default=None,
        ge=0,
        le=1,
        exclude_if=lambda it: it is None,
        description="The weight decay follows a cosine from `weight_decay` to this in each step of the whole run "
        "(DINO: 0.04 to 0.4). Null: it is constant.",
    )
    decay_norms_and_biases: bool = Field(
        default=True,
        exclude_if=lambda it: it,
        description="Whether weight decay acts on the scales of normalisations and on biases: all parameters of one "
        "dimension.",
    )
    layer_decay: float = Field(
        default=1.0,
        gt=0,
        le=1,
        exclude_if=lambda it: it == 1,
        description="The learning rate of each layer of the encoder is that of the next one times this; that of the "
        "heads is `learning_rate` (MAE's fine-tuning: 0.65 to 0.75).",
    )
    max_gradient_norm: float | None = Field(
        default=None,
        gt=0,
        le=1e6,
        exclude_if=lambda it: it is None,
        description="Gradients whose L2 norm, over all trained parameters together, is longer are scaled to this "
        "length before each step. Null: no limit.",
    )

    @model_validator(mode="after")
    def _schedules_fit(self) -> "OptimizerConfig":
        if self.warmup_rounds and self.schedule == "cosine":
            raise ValueError(
                "optimizer.warmup_rounds is a warm-up per step, and schedule cosine is constant inside a round: set "
                "schedule to cosine_per_step"
            )
        if self.final_learning_rate and self.schedule != "cosine_per_step":
            raise ValueError(
                "optimizer.final_learning_rate is the end of the schedule cosine_per_step: set that schedule"
            )
        if self.final_learning_rate > self.learning_rate:
            raise ValueError("optimizer.final_learning_rate is larger than learning_rate: the cosine descends")
        return self

    @property
    def changes_per_step(self) -> bool:
        """True if the learning rate or the weight decay changes from step to step."""
        return self.schedule == "cosine_per_step" or self.warmup_rounds > 0 or self.final_weight_decay is not None

    def learning_rate_at(self, rounds_done: float, num_rounds: int) -> float:
        """Return the learning rate after `rounds_done` of the run's rounds, a fraction inside a round.

        The warm-up and `cosine_per_step` are those of MAE's code (`util/lr_sched.py`), with rounds in place of epochs.

        >>> config = OptimizerConfig(learning_rate=1.0, schedule="cosine_per_step", warmup_rounds=2)
        >>> [round(config.learning_rate_at(done, 10), 3) for done in (0, 0.5, 2, 6, 10)]
        [0.0, 0.25, 1.0, 0.5, 0.0]
        """
        if self.schedule == "cosine":  # EasyFL's
            return self.learning_rate * (1 + math.cos(math.pi * math.floor(rounds_done) / num_rounds)) / 2
        if rounds_done < self.warmup_rounds:
            return self.learning_rate * rounds_done / self.warmup_rounds
        if self.schedule == "constant":
            return self.learning_rate
        share = (rounds_done - self.warmup_rounds) / max(num_rounds - self.warmup_rounds, 1e-12)
        last = self.final_learning_rate
        return last + (self.learning_rate - last) * (1 + math.cos(math.pi * share)) / 2

    def weight_decay_at(self, rounds_done: float, num_rounds: int) -> float:
        """Return the weight decay after `rounds_done` of the run's rounds, a fraction inside a round.

        The cosine is that of DINO's code (`cosine_scheduler` of `utils.py`).
        """
        if self.final_weight_decay is None:
            return self.weight_decay
        last = self.final_weight_decay
        return last + (self.weight_decay - last) * (1 + math.cos(math.pi * rounds_done / num_rounds)) / 2


class TrainingConfig(StrictModel):
    """One client's work in one round."""

    local_epochs: int = Field(default=1, ge=0, le=10_000)
    epoch_fraction: float = Field(
        default=1.0,
        gt=0,
        le=1,
        exclude_if=lambda it: it == 1,
        description="An epoch is this fraction of the batches, drawn from all images, and at least one batch: with "
        "`local_epochs = 1`, a round shorter than an epoch.",
    )
    batch_size: int = Field(default=128, ge=2, le=65_536)
    drop_last: bool = Field(
        default=True, description="Drop an incomplete last batch; a client's only batch is never dropped."
    )
    num_micro_batches: int = Field(
        default=1,
        ge=1,
        le=1024,
        exclude_if=lambda it: it == 1,
        description="Cut each batch into this many equal parts, whose gradients are averaged before the optimiser's "
        "step: the memory of a smaller batch. Each part is a batch of its own for BatchNorm and for losses that "
        "compare images with each other: contrastive losses have only the negatives of the part.",
    )
    gradient_checkpointing: bool = Field(
        default=False,
        exclude_if=lambda it: not it,
        description="Compute the activations inside the encoder's blocks again for their gradients, in place of "
        "keeping them: less memory, one more forward pass per step, and the same bits.",
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
    deterministic: bool = Field(
        default=False,
        exclude_if=lambda it: not it,
        description="On a GPU, choose no algorithm by its speed, and only convolutions that add up in a fixed order: "
        "slower, and two runs on GPUs of the same kind have the same bits. Those of a CPU have them anyway.",
    )
    optimizer: OptimizerConfig = OptimizerConfig()

    @model_validator(mode="after")
    def _can_repeat(self) -> "TrainingConfig":
        if self.deterministic and self.gpu_steps == "compiled":
            raise ValueError(
                "training.deterministic cannot be combined with compiled steps, whose kernels are chosen by their "
                "speed: set gpu_steps to recorded or eager, or leave it out"
            )
        return self

    @model_validator(mode="after")
    def _can_recompute(self) -> "TrainingConfig":
        if self.gradient_checkpointing and self.gpu_steps == "compiled":
            raise ValueError(
                "training.gradient_checkpointing cannot be combined with compiled steps: set gpu_steps to recorded or "
                "eager, or leave it out"
            )
        return self

    @model_validator(mode="after")
    def _divides_batches(self) -> "TrainingConfig":
        if self.batch_size % self.num_micro_batches or self.batch_size // self.num_micro_batches < 2:
            raise ValueError(
                f"training.batch_size {self.batch_size} cannot be cut into {self.num_micro_batches} equal parts of at "
                "least 2 images: change batch_size or num_micro_batches"
            )
        return self

    @property
    def num_epochs(self) -> float:
        """Return the number of passes over a client's images in a round."""
        return self.local_epochs * self.epoch_fraction

    def num_steps(self, num_batches: int) -> int:
        """Return the number of batches in an epoch, rounded half up; the images can be cut into `num_batches`."""
        return min(num_batches, _share(self.epoch_fraction, num_batches))


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
        """Return the number of updates that close a round: `fraction` of the clients, rounded half up, at least one."""
        return _share(self.fraction, num_clients)

    def num_asked(self, num_clients: int) -> int:
        """Return the number of clients that a round is offered to: `over_sampling` times as many, or all of fewer."""
        return min(num_clients, math.ceil(Fraction(str(self.over_sampling)) * self.num_wanted(num_clients)))


def _share(fraction: float, count: int) -> int:
    """Return a fraction of a count, rounded half up, and at least 1."""
    # Uses the decimal fraction as it was written: in binary, 0.29 * 50 is a little less than 14.5.
    return max(1, int(Fraction(str(fraction)) * count + Fraction(1, 2)))


Seed = Annotated[int, Field(ge=0, lt=2**63)]
