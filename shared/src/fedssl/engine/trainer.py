"""The objects that local training builds and the next client reuses: modules, the optimiser's state, captured steps."""

import itertools
import threading
import time
from collections.abc import Hashable, Iterator
from contextlib import contextmanager

import torch

from fedssl.artifacts.tensors import Tensors
from fedssl.data.image_batches import MakeViews, each_view
from fedssl.data_parallel import num_devices
from fedssl.engine.cuda_graphs import CapturedSteps, can_capture
from fedssl.engine.data_parallel import parallel_step
from fedssl.engine.optimization import optimizer_for
from fedssl.engine.parameter_groups import set_rates
from fedssl.engine.recorded_views import RecordedViews
from fedssl.engine.step_rates import StepRates
from fedssl.engine.steps import Step, StepValues, eager_step
from fedssl.methods import Method
from fedssl.methods.api import Batch, Context, Schedule
from fedssl.methods.composition.splitting import split_encoders


class Trainer:
    """The modules of one method and spec on one device. They train one client after another."""

    def __init__(self, method: Method, ctx: Context) -> None:
        bound = method.bind(ctx.spec)
        self.plan, self.algorithm, self.rounded = bound.plan, bound.client, bound.rounded
        self.modules = self.algorithm.build(ctx)
        if num_devices() > 1:
            split_encoders(self.modules)
        self.modules.to(ctx.device).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self._initial = {name: tensor.clone() for name, tensor in self._tensors().items()}
        self._captured: CapturedSteps | None = None
        training = ctx.spec.training
        records = can_capture(ctx.device) and num_devices() == 1 and training.gpu_steps != "eager"
        self.make_views: MakeViews = RecordedViews(training.batch_size) if records else each_view
        self.last_used = time.monotonic()

    def _tensors(self) -> Tensors:
        named = (*self.modules.named_parameters(), *self.modules.named_buffers())
        return {name: tensor.detach() for name, tensor in named}

    def reset(self) -> None:
        """Reset the modules to their first state: no client's round may depend on the previous client's."""
        for name, tensor in self._tensors().items():
            tensor.copy_(self._initial[name])
        self.modules.train()

    def start_round(self, schedule: Schedule, ctx: Context) -> Step:
        """Return the step of a round whose broadcast the modules have received, with a fresh optimiser."""
        is_parallel = num_devices() > 1
        if is_parallel or not can_capture(ctx.device):
            factors = self.algorithm.learning_rate_factors(ctx)
            optimizer = optimizer_for(self.modules, ctx.spec.training.optimizer, schedule.learning_rate, factors)
            given = (self.algorithm, self.modules, optimizer, ctx)
            step = parallel_step(*given) if is_parallel else eager_step(*given)
            return scheduled(step, optimizer, StepRates(schedule, ctx))
        if self._captured is None:
            num_steps = schedule.num_epochs * schedule.steps_per_epoch
            self._captured = CapturedSteps(self.algorithm, self.modules, ctx, num_steps)
        return self._captured.start_round(schedule, ctx)


def scheduled(step: Step, optimizer: torch.optim.Optimizer, rates: StepRates) -> Step:
    """Return a round's step that sets its own rates before it is taken, if they change from step to step."""
    if rates.are_constant:
        return step
    numbers = itertools.count()

    def take(batch: Batch) -> StepValues:
        set_rates(optimizer, *rates.at(next(numbers)))
        return step(batch)

    return take


_lock = threading.Lock()
_idle: dict[Hashable, Trainer] = {}
"""The trainer of the last round, by what it was built for. One is enough because one run trains at a time."""


@contextmanager
def borrow_trainer(method: Method, ctx: Context) -> Iterator[Trainer]:
    """Lend a trainer for one round, in its initial state: the last round's if it was built for the same method and
    spec. It is kept for the next round unless this one fails. Meanwhile, no other caller gets it."""
    made_for = (method, ctx.spec.model_dump_json(), method.bind(ctx.spec).client.architecture(ctx), ctx.device)
    with _lock:
        trainer = _idle.pop(made_for, None)
        _idle.clear()  # before another one is built, because two may not fit on the device
    if trainer is None:
        trainer = Trainer(method, ctx)
    trainer.reset()
    yield trainer
    trainer.last_used = time.monotonic()
    with _lock:
        _idle.clear()
        _idle[made_for] = trainer


def release_trainer(unused_seconds: float = 0.0) -> None:
    """Release the last round's modules if it ended that long ago, and the GPU memory that they held.

    A round that failed or was cancelled keeps no modules: what it left in torch's cache is released too.
    """
    with _lock:
        if any(time.monotonic() - trainer.last_used < unused_seconds for trainer in _idle.values()):
            return
        _idle.clear()
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()
