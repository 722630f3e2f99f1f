"""The progress of a run, for what changes from step to step, such as a target's momentum."""

import math

import torch
from torch import Tensor, nn

from fedssl.methods.api import Context, Schedule
from fedssl.methods.composition.modules import module_of

PROGRESS = "progress"


class Progress(nn.Module):
    """The steps that a round of a client has done. They are buffers, so that a captured step counts too.

    They depend only on the round and the step's place in it: a client needs no state for them.
    """

    step: Tensor
    num_steps: Tensor
    rounds_before: Tensor

    def __init__(self) -> None:
        super().__init__()
        for name, value in (("step", 0), ("num_steps", 1), ("rounds_before", 0)):
            self.register_buffer(name, torch.tensor(value))

    def start(self, schedule: Schedule, ctx: Context) -> None:
        """Begin the steps of a round."""
        self.step.zero_()
        self.num_steps.fill_(max(1, schedule.num_epochs * schedule.steps_per_epoch))
        self.rounds_before.fill_(ctx.round_number - 1)

    def advance(self) -> None:
        """Count a step."""
        self.step.add_(1)

    def rounds(self) -> Tensor:
        """Return how many of the run's rounds are done, a fraction inside a round, as a float32 number (1)."""
        return self.rounds_before + self.step / self.num_steps


def cosine_to_one(momentum: float, share: Tensor) -> Tensor:
    """Return the momentum 1 - (1 - m) (1 + cos(pi k)) / 2 after a share k of the run: from m to 1.

    Reference: BYOL (Grill et al. 2020), Section 3.3; DINO (Caron et al. 2021), Section 3.1.

    >>> [round(float(cosine_to_one(0.9, torch.tensor(share))), 4) for share in (0.0, 0.5, 1.0)]
    [0.9, 0.95, 1.0]
    """
    return 1 - (1 - momentum) * (1 + torch.cos(math.pi * share)) / 2


def progress(modules: nn.ModuleDict) -> Progress:
    """Return the run's progress."""
    return module_of(modules, PROGRESS, Progress)
