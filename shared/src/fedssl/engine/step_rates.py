"""The learning rate and the weight decay of each step of a round."""

from dataclasses import dataclass
from typing import NamedTuple

from fedssl.methods.api import Context, Schedule


class Rates(NamedTuple):
    """The numbers that an optimiser's step depends on besides its state."""

    learning_rate: float
    weight_decay: float


@dataclass(frozen=True, slots=True)
class StepRates:
    """The rates of one client's steps in one round. They depend only on the round and the step's place in it, so a
    client that was killed, or was not in each round's cohort, needs no state for them."""

    schedule: Schedule
    ctx: Context

    @property
    def are_constant(self) -> bool:
        """True if all steps of the round have the rates of the first."""
        return not self.ctx.spec.training.optimizer.changes_per_step

    def at(self, step: int) -> Rates:
        """Return the rates of a step, counted from 0."""
        optimizer, num_rounds = self.ctx.spec.training.optimizer, self.ctx.spec.num_rounds
        if self.are_constant:
            return Rates(self.schedule.learning_rate, optimizer.weight_decay)
        num_steps = self.schedule.num_epochs * self.schedule.steps_per_epoch
        done = self.ctx.round_number - 1 + step / max(num_steps, 1)
        return Rates(optimizer.learning_rate_at(done, num_rounds), optimizer.weight_decay_at(done, num_rounds))
