"""One training step: objective, gradients, optimiser, and what follows it."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import nn

from fedssl.engine.optimization import autocast, take_step, total_loss
from fedssl.methods.api import Batch, Context, Losses
from fedssl.methods.composition.client import ClientAlgorithm

LossFunction = Callable[[nn.ModuleDict, Batch, Context], Losses]


class Terms(NamedTuple):
    """What a step found: the terms' names, the total `loss` last, and their values (T,), float32 on the device.

    A GPU's next step writes over the values.
    """

    names: tuple[str, ...]
    values: torch.Tensor


Step = Callable[[Batch], Terms]


def eager_step(
    algorithm: ClientAlgorithm,
    modules: nn.ModuleDict,
    optimizer: torch.optim.Optimizer,
    ctx: Context,
    objective: LossFunction | None = None,
) -> Step:
    """The step of one round. `objective`: the algorithm's own, or what a compiler made of it."""
    terms_of = algorithm.objective if objective is None else objective

    def step(batch: Batch) -> Terms:
        with autocast(ctx):
            losses = terms_of(modules, batch, ctx)
            total = total_loss(losses)
        take_step(optimizer, total)
        algorithm.after_step(modules, ctx)
        names = (f"loss/{name}" if term.requires_grad else name for name, term in losses.items())
        return Terms((*names, "loss"), torch.stack([term.detach().float() for term in (*losses.values(), total)]))

    return step
