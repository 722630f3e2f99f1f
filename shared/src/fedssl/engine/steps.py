"""One training step: objective, gradients, optimiser, and what comes before and after."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import nn

from fedssl.engine.optimization import autocast, move, take_step, total_loss
from fedssl.methods.api import Batch, Context, Terms
from fedssl.methods.composition.client import ClientAlgorithm

LossFunction = Callable[[nn.ModuleDict, Batch, Context], Terms]


class StepValues(NamedTuple):
    """The report of a step: the names of its losses, its measurements and last the total `loss`, and their values (T,),
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
    training = ctx.spec.training
    max_norm = training.optimizer.max_gradient_norm

    def losses_of(batch: Batch) -> tuple[torch.Tensor, StepValues]:
        with autocast(ctx):
            losses, measurements = terms_of(modules, batch, ctx)
            total = total_loss(losses)
        names = (*(f"loss/{name}" for name in losses), *measurements, "loss")
        values = (*losses.values(), *measurements.values(), total)
        return total, StepValues(names, torch.stack([value.detach().float() for value in values]))

    def step(batch: Batch) -> StepValues:
        algorithm.before_step(modules, ctx)
        parts = micro_batches(batch, training.num_micro_batches)
        if len(parts) == 1:
            total, reported = losses_of(batch)
            take_step(optimizer, total, max_norm)
        else:
            reported = accumulate(parts)
            move(optimizer, max_norm)
        algorithm.after_step(modules, ctx)
        return reported

    def accumulate(parts: Sequence[Batch]) -> StepValues:
        """Add up the gradients of the parts, each weighted by its images. Returns the mean of what they report."""
        optimizer.zero_grad(set_to_none=True)
        names: tuple[str, ...] = ()
        means = torch.zeros((), device=ctx.device)
        num_images = sum(len(part.indices) for part in parts)
        for part in parts:
            total, (names, values) = losses_of(part)
            share = len(part.indices) / num_images
            (share * total).backward()  # type: ignore[no-untyped-call]
            means = means + share * values
        return StepValues(names, means)

    return step


def micro_batches(batch: Batch, num_parts: int) -> list[Batch]:
    """Cut a batch into parts whose sizes differ by at most one image, of at least two images each."""
    num_parts = max(1, min(num_parts, len(batch.indices) // 2))
    if num_parts == 1:
        return [batch]
    views = zip(*(view.tensor_split(num_parts) for view in batch.views), strict=True)
    indices = batch.indices.tensor_split(num_parts)
    labels = [None] * num_parts if batch.labels is None else batch.labels.tensor_split(num_parts)
    extra = {name: images.tensor_split(num_parts) for name, images in batch.extra.items()}
    local = [view.tensor_split(num_parts) for view in batch.local_views]
    return [
        replace(
            batch,
            views=part,
            indices=indices[number],
            labels=labels[number],
            extra={name: images[number] for name, images in extra.items()},
            local_views=tuple(view[number] for view in local),
        )
        for number, part in enumerate(views)
    ]
