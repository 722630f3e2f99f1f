"""One client's round: merge the broadcast, train, and return the update and the state to keep."""

import dataclasses
import functools
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from fedssl.artifacts.tensors import Tensors, check_tensors, in_name_order
from fedssl.data_parallel import broadcast_first
from fedssl.engine.cuda_graphs import on_own_stream
from fedssl.engine.distillation import DistillationProgress, run_distillation
from fedssl.engine.trainer import Trainer, borrow_trainer
from fedssl.errors import MethodError
from fedssl.methods import Method
from fedssl.methods.api import ClientData, ClientState, Context, Metrics, Schedule
from fedssl.methods.composition.rounding import rounded_update
from fedssl.methods.diagnostics import observe
from fedssl.precision import exact_float32

_REMEDY = "lower training.optimizer.learning_rate"
_LARGEST_TRAINED = 1e6  # no training gives larger weights
PROGRESS_SECONDS = 0.5  # reading a loss waits for the device, so it is not done in every step


@dataclass(frozen=True, slots=True)
class LocalProgress:
    """The progress of local training. `images_per_second` counts images, not views."""

    epoch: int
    num_epochs: int
    step: int
    num_steps: int
    loss: float | None
    images_per_second: float


@dataclass(frozen=True, slots=True)
class LocalResult:
    """The result of a round of local training: `update` is sent to the coordinator, `state` stays on the client.

    `num_examples`: the client's weight in a mean. `num_images`: the images of all steps, counting repetitions.
    """

    update: Tensors
    state: ClientState
    num_examples: int
    metrics: Metrics
    num_images: int = 0


OnProgress = Callable[[LocalProgress], None]


def run_local_round(
    method: Method,
    broadcast: Mapping[str, torch.Tensor],
    state: Mapping[str, torch.Tensor] | None,
    data: ClientData,
    ctx: Context,
    on_progress: OnProgress = lambda progress: None,
) -> LocalResult:
    """Train one client for one round. `broadcast` also has the frozen tensors, if the encoder has some.

    `on_progress` is called about twice a second and may raise `Cancelled` to end the round. Raises PlanMismatch if the
    broadcast or the update is not what the method declares, and MethodError if the loss, the update or the state is no
    longer finite. (The last step's loss is computed before its weights change, so the loss does not show that.)
    """
    # A client that also trains on public images (FLESD with client_distillation) can be cancelled after each epoch.
    distil = functools.partial(run_distillation, on_epoch=lambda progress: on_progress(_distilling(progress)))
    ctx = dataclasses.replace(ctx, distil=distil)
    exact = exact_float32(ctx.device, deterministic=ctx.spec.training.deterministic)
    with borrow_trainer(method, ctx) as trainer, exact, on_own_stream(ctx.device):
        check_tensors(broadcast, trainer.plan.received, "broadcast")
        received = in_name_order(broadcast)
        kept = None if state is None else in_name_order(state)
        algorithm, modules = trainer.algorithm, trainer.modules
        algorithm.merge(modules, received, kept, data, ctx)
        metrics = algorithm.judge(modules, data, ctx)
        trained = algorithm.trained(data)
        schedule = algorithm.schedule(len(trained), ctx)
        means, num_images = _train(trainer, trained, schedule, received, ctx, on_progress)
        metrics |= means
        metrics |= observe(modules, data, received, ctx)
        update, next_state = algorithm.finish(modules, data, schedule, ctx)
        if trainer.rounded:
            update, errors = rounded_update(update, received, kept or {}, trainer.rounded)
            next_state = {**next_state, **errors}
        check_tensors(update, trainer.plan.update, "update")
        broken = _first_not_finite(update, next_state, ctx.device)
        result = LocalResult(_copied(update), _copied(next_state), len(trained), metrics, num_images)
    if broken is not None:
        raise MethodError(f"{broken} holds numbers that are not finite: {_remedy(received)}")
    return result


def _train(
    trainer: Trainer,
    data: ClientData,
    schedule: Schedule,
    received: Tensors,
    ctx: Context,
    on_progress: OnProgress,
) -> tuple[Metrics, int]:
    """Return the metrics of the training, and the number of images of all steps."""
    algorithm, modules = trainer.algorithm, trainer.modules
    algorithm.start_steps(modules, schedule, ctx)
    take_step = trainer.start_round(schedule, ctx)
    report = _Report(schedule, on_progress)
    names: tuple[str, ...] = ()
    sums = torch.zeros((), device=ctx.device)
    first: torch.Tensor | None = None
    for epoch in range(schedule.num_epochs):
        sums = torch.zeros_like(sums)  # the metrics are the last epoch's means
        algorithm.begin_epoch(modules, data, epoch, ctx)
        broadcast_first(modules)
        for batch in algorithm.batches(data, epoch, ctx, trainer.make_views):
            names, values = take_step(batch)
            sums = sums + values
            first = values.clone() if first is None else first
            report.step(epoch, len(batch.indices), values[-1])
    if first is None:
        return {}, 0
    means = {name: value / schedule.steps_per_epoch for name, value in zip(names, sums.tolist(), strict=True)}
    if bad := [name for name, value in means.items() if not math.isfinite(value)]:
        began_finite = all(map(math.isfinite, first.tolist()))
        raise MethodError(f"{bad[0]} is not a finite number: {_remedy(received, began_finite=began_finite)}")
    return means, report.num_images


def _copied(tensors: Mapping[str, torch.Tensor]) -> Tensors:
    """Return copies of the tensors, in name order: the next round overwrites the modules' own."""
    return {
        name: tensors[name].detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
        for name in sorted(tensors)
    }


def _first_not_finite(update: Tensors, state: ClientState, device: torch.device) -> str | None:
    """Return the name of the first tensor that is not finite. All are checked on the device, which is read once."""
    named = [*sorted(update.items()), *sorted(state.items())]
    floats = [(name, tensor) for name, tensor in named if tensor.is_floating_point()]
    if not floats:
        return None
    finite = torch.stack([tensor.isfinite().all().to(device) for _, tensor in floats]).tolist()
    return next((name for (name, _), is_finite in zip(floats, finite, strict=True) if not is_finite), None)


def _remedy(received: Tensors, *, began_finite: bool = True) -> str:
    """Return what to do about a training that failed: the cause may be what the client received."""
    largest = max((float(each.abs().max()) for each in received.values() if each.is_floating_point()), default=0.0)
    if began_finite and largest <= _LARGEST_TRAINED:
        return _REMEDY
    return (
        f"the cause is what this client received (weights up to {largest:.3g}), not its own training. Check the run's "
        f"events for update.unusual; if there is none, {_REMEDY}"
    )


def _distilling(progress: DistillationProgress) -> LocalProgress:
    epoch, num_epochs = progress.epoch, progress.num_epochs
    return LocalProgress(epoch, num_epochs, epoch, num_epochs, progress.loss, images_per_second=0.0)


class _Report:
    """Counts steps and their images, and reports progress at most once per `PROGRESS_SECONDS`."""

    def __init__(self, schedule: Schedule, on_progress: OnProgress) -> None:
        self._schedule = schedule
        self._on_progress = on_progress
        self._steps = 0
        self.num_images = 0
        self._start = self._last = time.monotonic()

    def step(self, epoch: int, num_images: int, loss: torch.Tensor) -> None:
        self._steps += 1
        self.num_images += num_images
        num_steps = self._schedule.num_epochs * self._schedule.steps_per_epoch
        now = time.monotonic()
        if now - self._last < PROGRESS_SECONDS and self._steps < num_steps:
            return
        value = float(loss)  # waits for the device, so that the time of steps that it has yet to take counts too
        now = self._last = time.monotonic()
        self._on_progress(
            LocalProgress(
                epoch=epoch + 1,
                num_epochs=self._schedule.num_epochs,
                step=self._steps,
                num_steps=num_steps,
                loss=value if abs(value) < float("inf") else None,
                images_per_second=self.num_images / max(now - self._start, 1e-9),
            )
        )
