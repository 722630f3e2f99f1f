"""One training step: objective, gradients, optimiser, and what comes before and after."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import nn

from fedssl.engine.optimization import autocast, take_step, total_loss
from fedssl.methods.api import Batch, Context, Terms
from fedssl.methods.composition.client import ClientAlgorithm

LossFunction = Callable[[nn.ModuleDict, Batch, Context], Terms]


class StepValues(NamedTuple):
    """What a step reports: the names of its losses, its measurements and last the total `loss`, and their values (T,),
    float32 on the device.

    The next step on a GPU overwrites the values.
    """

    names: tuple[str, ...]
    values: torch.Tensor


Step = Callable[[Batch], StepValues]


def eager_step(
    algorithm: ClientAlgorithm,
    modules: nn.ModuleDict,
    optimizer: torch.optim.Optimizer,
    ctx: Context,
    objective: LossFunction | None = None,
) -> Step:
    """Return the step of one round. `objective` is the algorithm's own, or what a compiler made of it."""
    terms_of = algorithm.objective if objective is None else objective

    def step(batch: Batch) -> StepValues:
        algorithm.before_step(modules, ctx)
        with autocast(ctx):
            losses, measurements = terms_of(modules, batch, ctx)
            total = total_loss(losses)
        take_step(optimizer, total)
        algorithm.after_step(modules, ctx)
        names = (*(f"loss/{name}" for name in losses), *measurements, "loss")
        values = (*losses.values(), *measurements.values(), total)
        return StepValues(names, torch.stack([value.detach().float() for value in values]))

    return step
