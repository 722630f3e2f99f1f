"""Training steps on a GPU, captured once as a CUDA graph and then replayed.

A step is about a thousand kernels. If Python launches them one by one, the GPU waits between those of small batches; a
captured step is one launch. A capture fixes:

- memory: parameters, buffers, gradients, the optimiser's state and the batch stay at the same addresses, so that one
  capture serves all rounds and clients;
- every decision that Python made, and the optimiser's weight decay. `ClientAlgorithm.step_constants` returns those
decisions that may change, and if one of them or the decay changes, the step is captured again. A decay that changes in
each step therefore leaves every step eager. The learning rate is read from the device's memory (of LARS it is captured
too).

Only whole batches are replayed. An incomplete batch runs eagerly, as do the first few steps, in which cuDNN tries its
algorithms and libraries initialise. A step that cannot be captured or compiled stays eager.
"""

import dataclasses
import functools
import itertools
import os
import shutil
import warnings
from collections.abc import Hashable, Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress

import torch
from torch import nn

from fedssl.engine.optimization import optimizer_for, restart
from fedssl.engine.parameter_groups import are_on_device, set_rates
from fedssl.engine.step_rates import Rates, StepRates
from fedssl.engine.steps import LossFunction, Step, StepValues, eager_step
from fedssl.errors import MethodError
from fedssl.methods.api import Batch, Context, Schedule, Terms
from fedssl.methods.composition.client import ClientAlgorithm
from fedssl.protocol.runs import RunSpec

NUM_EAGER_STEPS = 3
COMPILE_FROM = 10_000
"""The number of steps of a client in the whole run from which `auto` compiles. Compiling takes about half a
minute."""


class CapturedSteps:
    """The steps of one algorithm on one set of modules, round after round. Use it inside `on_own_stream`."""

    def __init__(self, algorithm: ClientAlgorithm, modules: nn.ModuleDict, ctx: Context, num_steps: int) -> None:
        training = ctx.spec.training
        self._algorithm, self._modules = algorithm, modules
        self._batch_size = training.batch_size
        factors = algorithm.learning_rate_factors(ctx)
        self._optimizer = optimizer_for(modules, training.optimizer, training.optimizer.learning_rate, factors)
        self._objective = compiled(algorithm.objective) if wants_compiling(algorithm, ctx.spec, num_steps) else None
        self._can_capture = training.gpu_steps != "eager"
        self._rates: Rates | None = None
        self._key: Hashable = None
        self._num_eager = 0
        self._capture: _Capture | None = None

    def start_round(self, schedule: Schedule, ctx: Context) -> Step:
        """Return the step of a round that is about to begin."""
        restart(self._optimizer, schedule.learning_rate)
        self._rates = None
        rates, numbers = StepRates(schedule, ctx), itertools.count()
        given = (self._algorithm, self._modules, self._optimizer, ctx)
        plain, whole = eager_step(*given), eager_step(*given, self._objective)

        def step(batch: Batch) -> StepValues:
            now = rates.at(next(numbers))
            if now != self._rates:
                set_rates(self._optimizer, *now)
                self._rates = now
            if len(batch.indices) != self._batch_size:
                return plain(batch)
            with _benchmarking():
                return take_whole(batch, now)

        def take_whole(batch: Batch, now: Rates) -> StepValues:
            captured = now._replace(learning_rate=0.0) if are_on_device(self._optimizer) else now
            key = (captured, self._algorithm.step_constants(self._modules, ctx), *_layout(batch))
            if key != self._key:
                self._key, self._num_eager, self._capture = key, 0, None
            if not self._can_capture or self._num_eager < NUM_EAGER_STEPS:
                self._num_eager += 1
                return whole(batch)
            return self._replay(whole, batch)

        return step

    def _replay(self, step: Step, batch: Batch) -> StepValues:
        if self._capture is None:
            self._optimizer.zero_grad(set_to_none=True)
            try:
                self._capture = _Capture(step, batch, self._modules)
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as error:
                self._can_capture = False
                cause = error.__context__ or error  # the second error means that the capture could not end
                warnings.warn(f"the training step cannot be recorded and is taken eagerly: {cause}", stacklevel=2)
                return step(batch)
        return self._capture.replay(batch)


class _Capture:
    """One step as a CUDA graph, with memory for its batch. Creating it takes no step."""

    def __init__(self, step: Step, batch: Batch, modules: nn.ModuleDict) -> None:
        self._batch = dataclasses.replace(
            batch,
            views=tuple(view.clone() for view in batch.views),
            indices=batch.indices.clone(),
            labels=None if batch.labels is None else batch.labels.clone(),
            extra={name: tensor.clone() for name, tensor in batch.extra.items()},
            local_views=tuple(view.clone() for view in batch.local_views),
        )
        self._graph = torch.cuda.CUDAGraph()
        with recording(self._graph, _generators(modules)):
            self._terms = step(self._batch)

    def replay(self, batch: Batch) -> StepValues:
        for place, tensor in zip(_tensors(self._batch), _tensors(batch), strict=True):
            place.copy_(tensor)
        self._graph.replay()
        return self._terms


@contextmanager
def recording(graph: torch.cuda.CUDAGraph, generators: Iterable[torch.Generator]) -> Iterator[None]:
    """Capture what the block launches, on the stream of the eager work before it, for which libraries have initialised.

    Other threads may keep working. `generators`: those that the block draws from.
    """
    for generator in generators:
        graph.register_generator_state(generator)
    pool, stream = torch.cuda.graph_pool_handle(), torch.cuda.current_stream()
    try:
        with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            yield
    except BaseException:
        _abandon(pool)
        raise


def _abandon(pool: tuple[int, int]) -> None:
    """End a failed capture in the allocator, which torch.cuda.graph does not do: its memory would never be freed, and
    releasing cached memory would fail from then on. torch has no public function for this."""
    names = ("_cuda_endAllocateToPool", "_cuda_releasePool")
    end, release = (getattr(torch._C, name, None) for name in names)
    if end is None or release is None:
        raise MethodError('the training step cannot be recorded on this GPU: set training.gpu_steps = "eager"')
    device = torch.cuda.current_device()
    with suppress(RuntimeError):  # torch may have done this itself
        end(device, pool)
        release(device, pool)


@contextmanager
def _benchmarking() -> Iterator[None]:
    """Let cuDNN benchmark its algorithms inside the block: only for whole batches, not for each client's last one.

    Which of them is fastest may differ from process to process, and with it the last bits. So a process that asked for
    deterministic algorithms gets none chosen by speed.
    """
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = not torch.backends.cudnn.deterministic
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before


def _tensors(batch: Batch) -> list[torch.Tensor]:
    labels = () if batch.labels is None else (batch.labels,)
    return [*batch.views, batch.indices, *labels, *batch.local_views, *batch.extra.values()]


def _layout(batch: Batch) -> tuple[Hashable, ...]:
    return (tuple(batch.extra), *((tensor.shape, tensor.dtype) for tensor in _tensors(batch)))


def _generators(modules: nn.ModuleDict) -> list[torch.Generator]:
    """Return the generators that steps draw from: a replay must advance them."""
    values = (value for module in modules.modules() for value in vars(module).values())
    return [value for value in values if isinstance(value, torch.Generator)]


def can_capture(device: torch.device) -> bool:
    """Return whether steps on this device can be captured. On a CPU, neither capturing nor compiling saves time."""
    return device.type == "cuda"


def wants_compiling(algorithm: ClientAlgorithm, spec: RunSpec, num_steps: int) -> bool:
    """Return whether the run's steps are compiled. `num_steps` are this client's in this round."""
    training = spec.training
    wanted, can_compile = training.gpu_steps, algorithm.compiles and not training.gradient_checkpointing
    can_compile &= not training.deterministic  # the compiler chooses kernels by their speed, too
    is_long = num_steps * spec.num_rounds >= COMPILE_FROM
    return wanted == "compiled" or (wanted == "auto" and is_long and can_compile and _has_c_compiler())


def _has_c_compiler() -> bool:
    """Return whether torch.compile will find the C compiler that it needs, where Triton searches for it."""
    return bool(os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang"))


def compiled(objective: LossFunction) -> LossFunction:
    """Return the objective with its kernels fused by torch.compile at the first call, or eager if that fails."""
    # One run trains at a time. Programs of earlier runs would count against the compiler's limit of variants.
    torch.compiler.reset()
    fused = torch.compile(objective, dynamic=False)
    is_new, failed = True, False

    def run(modules: nn.ModuleDict, batch: Batch, ctx: Context) -> Terms:
        nonlocal is_new, failed
        from torch._dynamo.exc import TorchDynamoException  # loads the compiler, which takes seconds

        if not failed:
            try:
                with _compiling_backward(), _no_tf32_warning() if is_new else nullcontext():
                    found: Terms = fused(modules, batch, ctx)
                is_new = False
                return found
            except TorchDynamoException as error:
                failed = True
                warnings.warn(f"the training step cannot be compiled and stays as it is: {error}", stacklevel=2)
        return objective(modules, batch, ctx)

    return run


@contextmanager
def _compiling_backward() -> Iterator[None]:
    """Compile the backward pass together with the forward pass: a failure inside `backward` could not be caught."""
    from torch._functorch import config

    name = "force_non_lazy_backward_lowering"
    with config.patch(name, True) if hasattr(config, name) else nullcontext():
        yield


@contextmanager
def _no_tf32_warning() -> Iterator[None]:
    """Suppress the compiler's warning that rounded float32 would be faster: exact float32 is intended."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "TensorFloat32 tensor cores", UserWarning)
        yield


@contextmanager
def on_own_stream(device: torch.device) -> Iterator[None]:
    """Run the block on the engine's own stream of a GPU, because the default stream cannot be captured."""
    if device.type != "cuda":
        yield
        return
    own, outer = _stream(device), torch.cuda.current_stream(device)
    own.wait_stream(outer)
    try:
        with torch.cuda.stream(own):
            yield
    finally:
        outer.wait_stream(own)


@functools.cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
