"""Training on the coordinator, between a round's updates and its broadcast."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

from fedssl.artifacts.tensors import Tensors, in_name_order
from fedssl.engine.optimization import autocast, optimizer_for, take_step, total_loss
from fedssl.errors import CheckpointMismatch, MethodError
from fedssl.methods.api import Context, Distillation, Metrics
from fedssl.precision import exact_float32

_MODULES, _OPTIMIZER = "modules.", "optimizer."


@dataclass(frozen=True, slots=True)
class DistillationProgress:
    """The progress of a training on public images: the epochs done, and the mean loss of the last one."""

    epoch: int
    num_epochs: int
    loss: float | None


OnEpoch = Callable[[DistillationProgress], None]


class DistillationCheckpoint(Protocol):
    """Stores the progress of one distillation, so that it can be resumed after a crash."""

    def load(self) -> Tensors | None:
        """Return what was saved last, or None."""
        ...

    def save(self, tensors: Tensors) -> None:
        """Replace what was saved, atomically."""
        ...


def run_distillation(
    task: Distillation,
    ctx: Context,
    on_epoch: OnEpoch = lambda progress: None,
    checkpoint: DistillationCheckpoint | None = None,
) -> tuple[Tensors, Metrics]:
    """Train `task` to its end, and return its result and its last epoch's loss.

    `on_epoch` is called after every epoch and may raise `Cancelled`. `checkpoint` is read at the start and written
    after every epoch: a distillation that is run again resumes there, and ends with the same bits. It must belong to
    this task. Raises MethodError when the loss is no longer finite, and CheckpointMismatch.
    """
    modules = task.build(ctx)
    modules.to(ctx.device).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    modules.train()
    optimizer = optimizer_for(modules, task.optimizer, task.optimizer.learning_rate)
    saved = None if checkpoint is None else checkpoint.load()
    done, loss = (0, None) if saved is None else _resume(saved, modules, optimizer)
    for epoch in range(done, task.num_epochs):
        with exact_float32(ctx.device, deterministic=ctx.spec.training.deterministic):
            loss = _train_epoch(task, modules, optimizer, epoch, ctx)
        if checkpoint is not None:
            checkpoint.save(_state(modules, optimizer, epoch + 1, loss))
        on_epoch(DistillationProgress(epoch + 1, task.num_epochs, loss))
    metrics = {} if loss is None else {"distillation_loss": loss}
    return in_name_order(task.result(modules)), metrics


def _train_epoch(
    task: Distillation, modules: nn.ModuleDict, optimizer: torch.optim.Optimizer, epoch: int, ctx: Context
) -> float | None:
    steps = task.steps(modules, epoch, ctx)
    totals: list[torch.Tensor] = []
    while True:
        with autocast(ctx):  # the networks run inside `next`
            losses = next(steps, None)
        if losses is None:
            break
        total = total_loss(losses)
        take_step(optimizer, total, task.optimizer.max_gradient_norm)
        totals.append(total.detach())
    if not totals:
        return None
    mean = float(torch.stack(totals).mean())
    if not abs(mean) < float("inf"):
        raise MethodError("the distillation's loss is not a finite number: lower its optimiser's learning_rate")
    return mean


def _state(modules: nn.ModuleDict, optimizer: torch.optim.Optimizer, epoch: int, loss: float | None) -> Tensors:
    tensors = {f"{_MODULES}{name}": tensor for name, tensor in modules.state_dict().items()}
    for number, values in optimizer.state_dict()["state"].items():
        tensors.update({f"{_OPTIMIZER}{number}.{name}": v for name, v in values.items() if torch.is_tensor(v)})
    tensors["epoch"] = torch.tensor(epoch)
    tensors["loss"] = torch.tensor(float("nan") if loss is None else loss, dtype=torch.float64)
    return in_name_order(tensors)


def epochs_done(saved: Tensors) -> int:
    """Return the number of epochs that a checkpoint has done. Raises CheckpointMismatch if it is not a checkpoint."""
    try:
        return int(saved["epoch"])
    except (KeyError, RuntimeError, ValueError) as error:
        raise CheckpointMismatch("these tensors are not a checkpoint of a distillation") from error


def _resume(saved: Tensors, modules: nn.ModuleDict, optimizer: torch.optim.Optimizer) -> tuple[int, float | None]:
    """Load what `_state` returned. Returns the epochs done and the loss of the last."""
    try:
        modules.load_state_dict({k.removeprefix(_MODULES): v for k, v in saved.items() if k.startswith(_MODULES)})
        values: dict[int, Tensors] = {}
        for key, tensor in saved.items():
            if key.startswith(_OPTIMIZER):
                number, name = key.removeprefix(_OPTIMIZER).split(".")
                values.setdefault(int(number), {})[name] = tensor
        optimizer.load_state_dict({**optimizer.state_dict(), "state": values})
        _lay_out(optimizer)
        loss = float(saved["loss"])
    except (KeyError, RuntimeError, ValueError) as error:
        raise CheckpointMismatch(f"the checkpoint is not of this distillation: {error}") from error
    return epochs_done(saved), None if loss != loss else loss


def _lay_out(optimizer: torch.optim.Optimizer) -> None:
    """Give the optimiser's state the memory layout of its parameters, which a fused kernel needs and a file lacks."""
    for parameter, state in optimizer.state.items():
        for name, value in state.items():
            if torch.is_tensor(value) and value.shape == parameter.shape:
                state[name] = torch.empty_like(parameter, requires_grad=False).copy_(value)
