"""One client's round: merge the broadcast, train, and hand back the update and the state to keep."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fedssl.artifacts.tensors import Tensors, check_tensors, in_name_order
from fedssl.engine.optimization import autocast, optimizer_for, take_step, total_loss
from fedssl.errors import MethodError
from fedssl.methods.api import ClientAlgorithm, ClientData, ClientState, Context, Losses, Method, Metrics, Schedule
from fedssl.methods.observation import observe

PROGRESS_SECONDS = 0.5  # reading a loss waits for the device, so it is done this often and not every step


@dataclass(frozen=True, slots=True)
class LocalProgress:
    """Where local training stands. `images_per_second` counts images, not views."""

    epoch: int
    num_epochs: int
    step: int
    num_steps: int
    loss: float | None
    images_per_second: float


@dataclass(frozen=True, slots=True)
class LocalResult:
    """What a round of local training leaves: `update` is for the coordinator, `state` stays."""

    update: Tensors
    state: ClientState
    num_examples: int
    metrics: Metrics


OnProgress = Callable[[LocalProgress], None]


def run_local_round(
    method: Method[Any],
    broadcast: Mapping[str, torch.Tensor],
    state: Mapping[str, torch.Tensor] | None,
    data: ClientData,
    ctx: Context,
    on_progress: OnProgress = lambda progress: None,
) -> LocalResult:
    """Train one client for one round.

    `on_progress` is called about twice a second and may raise `Cancelled` to end the round. Raises PlanMismatch when
    the broadcast or the update is not what the method declares, and MethodError when the loss is no longer finite.
    """
    config = ctx.spec.method
    plan = method.artifacts(config, ctx.spec)
    check_tensors(broadcast, plan.broadcast, "broadcast")
    received = in_name_order(broadcast)
    kept = None if state is None else in_name_order(state)
    algorithm = method.client(config)
    modules = algorithm.build(ctx)
    modules.to(ctx.device).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    modules.train()
    algorithm.merge(modules, received, kept, data, ctx)
    metrics = _train(algorithm, modules, data, received, ctx, on_progress)
    metrics |= observe(modules, data, received, ctx)
    update, next_state = algorithm.finish(modules, data, received, kept, ctx)
    check_tensors(update, plan.update, "update")
    return LocalResult(in_name_order(update), in_name_order(next_state), len(data), metrics)


def _train(
    algorithm: ClientAlgorithm,
    modules: nn.ModuleDict,
    data: ClientData,
    broadcast: Tensors,
    ctx: Context,
    on_progress: OnProgress,
) -> Metrics:
    schedule = algorithm.schedule(len(data), ctx)
    optimizer = optimizer_for(modules, ctx.spec.training.optimizer, schedule.learning_rate)
    report = _Report(schedule, on_progress)
    sums: Losses = {}
    for epoch in range(schedule.num_epochs):
        sums = {}  # the metrics are the last epoch's means
        algorithm.begin_epoch(modules, data, epoch, ctx)
        for batch in algorithm.batches(data, epoch, ctx):
            with autocast(ctx):
                losses = algorithm.objective(modules, batch, broadcast, ctx)
                total = total_loss(losses)
            take_step(optimizer, total)
            algorithm.after_step(modules, ctx)
            for name, term in {**_reported(losses), "loss": total}.items():
                sums[name] = sums.get(name, torch.zeros((), device=ctx.device)) + term.detach().float()
            report.step(epoch, len(batch.indices), total)
    return _means(sums, schedule.steps_per_epoch)


def _reported(losses: Losses) -> Losses:
    return {f"loss/{name}" if term.requires_grad else name: term for name, term in losses.items()}


def _means(sums: Losses, num_steps: int) -> Metrics:
    means = {name: float(value) / num_steps for name, value in sums.items()}
    if bad := [name for name, value in means.items() if not abs(value) < float("inf")]:
        raise MethodError(f"{bad[0]} is not a finite number: lower training.optimizer.learning_rate")
    return means


class _Report:
    """Counts steps and reports now and then."""

    def __init__(self, schedule: Schedule, on_progress: OnProgress) -> None:
        self._schedule = schedule
        self._on_progress = on_progress
        self._steps = 0
        self._images = 0
        self._start = self._last = time.monotonic()

    def step(self, epoch: int, num_images: int, loss: torch.Tensor) -> None:
        self._steps += 1
        self._images += num_images
        num_steps = self._schedule.num_epochs * self._schedule.steps_per_epoch
        now = time.monotonic()
        if now - self._last < PROGRESS_SECONDS and self._steps < num_steps:
            return
        self._last = now
        value = float(loss.detach())
        self._on_progress(
            LocalProgress(
                epoch=epoch + 1,
                num_epochs=self._schedule.num_epochs,
                step=self._steps,
                num_steps=num_steps,
                loss=value if abs(value) < float("inf") else None,
                images_per_second=self._images / max(now - self._start, 1e-9),
            )
        )
