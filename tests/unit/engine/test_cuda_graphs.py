"""Recorded steps compute the same as eager ones.

Without a GPU, torch.fx stands in for the CUDA graph: it also turns a step into a list of kernels on fixed memory that
runs without Python. tests/gpu uses real CUDA graphs.
"""

import dataclasses
import itertools
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

from fedssl import optimizers
from fedssl.engine import cuda_graphs, local, release_trainer, steps
from fedssl.engine import trainer as trainer_module
from fedssl.engine.cuda_graphs import COMPILE_FROM, NUM_EAGER_STEPS, CapturedSteps, compiled, wants_compiling
from fedssl.engine.optimization import move, optimizer_for, restart, total_loss
from fedssl.engine.recorded_views import RecordedViews
from fedssl.engine.steps import Step, StepValues
from fedssl.errors import MethodError
from fedssl.methods import METHODS
from fedssl.methods.api import Batch
from fedssl.methods.composition.client import ClientAlgorithm
from fedssl.precision import exact_float32
from fedssl.protocol.training import OptimizerConfig
from support.combinations import ALL_COMBINATIONS
from support.methods import method_spec, methods_of_this_run
from support.recorded_views import DATA, ViewsProgram, assert_equal_views
from support.rounds import client_data, local_round, start, training
from support.two_rounds import CLIENTS, assert_equal_up_to_rounding, two_epochs, two_rounds, two_rounds_spec


class _Steps(CapturedSteps):
    """Captured steps that count their replays, and give the stand-in access to the optimiser's memory."""

    current: "_Steps"

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.num_replays = 0

    def _replay(self, step: Step, batch: Batch) -> StepValues:
        _Steps.current = self
        self.num_replays += 1
        return super()._replay(step, batch)


class _Program:
    """A recording that does not need a GPU."""

    made: list["_Program"] = []

    def __init__(self, step: Step, batch: Batch, modules: nn.ModuleDict) -> None:
        copies = [tensor.clone() for tensor in cuda_graphs._tensors(batch)]
        views, extra = len(batch.views), len(batch.extra)
        self._places = copies
        self._batch = dataclasses.replace(
            batch,
            views=tuple(copies[:views]),
            indices=copies[views],
            labels=None if batch.labels is None else copies[views + 1],
            extra=dict(zip(batch.extra, copies[len(copies) - extra :], strict=True)),
            local_views=tuple(copies[len(copies) - extra - len(batch.local_views) : len(copies) - extra]),
        )
        memory = [*modules.state_dict().values(), *_state(_Steps.current._optimizer)]
        before = [tensor.clone() for tensor in memory]
        generators = cuda_graphs._generators(modules)
        drawn = [generator.get_state() for generator in generators]
        found: list[StepValues] = []

        def values() -> torch.Tensor:
            found.append(step(self._batch))
            return found[-1].values

        try:
            self._program = make_fx(values)()
        finally:  # tracing executes the step, recording does not
            for tensor, value in zip(memory, before, strict=True):
                tensor.detach().copy_(value)
            for generator, state in zip(generators, drawn, strict=True):
                generator.set_state(state)
        self._names = found[-1].names
        self.made.append(self)

    @torch.no_grad()
    def replay(self, batch: Batch) -> StepValues:
        for place, tensor in zip(self._places, cuda_graphs._tensors(batch), strict=True):
            place.copy_(tensor)
        return StepValues(self._names, self._program())


def _state(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [value for state in optimizer.state.values() for value in state.values() if torch.is_tensor(value)]


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[_Program]]:
    """Yield the list of recordings, which are made on the CPU."""
    release_trainer()
    _Program.made, ViewsProgram.made = [], []
    monkeypatch.setattr(trainer_module, "can_capture", lambda device: True)
    monkeypatch.setattr(trainer_module, "CapturedSteps", _Steps)
    monkeypatch.setattr(cuda_graphs, "_Capture", _Program)
    monkeypatch.setattr("fedssl.engine.recorded_views._Capture", ViewsProgram)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", torch.backends.cudnn.benchmark)
    # As on a GPU: torch's plain Adam would read its step counter from the device.
    adam = optimizers.Adam
    monkeypatch.setattr(optimizers, "Adam", lambda *args, **kwargs: adam(*args, **kwargs | {"fused": True}))
    yield _Program.made
    release_trainer()


@pytest.mark.full(but=1)
@pytest.mark.usefixtures("programs")
@pytest.mark.parametrize("name", DATA)
def test_recorded_views_have_the_bits_of_eager_ones(name: str) -> None:
    assert_equal_views(RecordedViews(4), DATA[name], "cpu")
    assert len(ViewsProgram.made) == 1


@pytest.mark.full(but=2)
@pytest.mark.parametrize("name", methods_of_this_run(ALL_COMBINATIONS))
def test_a_recording_is_reused_for_other_batches_rounds_and_clients(name: str, programs: list[_Program]) -> None:
    spec = two_rounds_spec(name)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer_module, "can_capture", lambda device: False)
        eager = two_rounds(spec)
    release_trainer()
    recorded = two_rounds(spec)
    assert programs
    assert ViewsProgram.made
    assert_equal_up_to_rounding(eager, recorded)
    for one, two in zip(eager, recorded, strict=True):
        for part in ("update", "state"):
            a, b = getattr(one, part), getattr(two, part)
            assert [tensor for tensor in a if not torch.equal(a[tensor], b[tensor])] == []
        assert one.metrics == pytest.approx(two.metrics, rel=1e-6)


@pytest.mark.full
@pytest.mark.parametrize("name", ALL_COMBINATIONS)
def test_rounding_errors_in_gradients_do_not_change_the_course_of_training(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise tests/gpu could not distinguish a wrong step from a different order of additions."""
    spec = two_rounds_spec(name)
    exact = two_rounds(spec)
    generator = torch.Generator().manual_seed(0)

    def rounded(optimizer: torch.optim.Optimizer, total: torch.Tensor, max_gradient_norm: float | None) -> None:
        optimizer.zero_grad(set_to_none=True)
        total.backward()  # type: ignore[no-untyped-call]
        for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
            if (gradient := parameter.grad) is not None:
                gradient += 2e-6 * gradient.abs().max() * torch.randn(gradient.shape, generator=generator)
        move(optimizer, max_gradient_norm)

    monkeypatch.setattr(steps, "take_step", rounded)
    assert_equal_up_to_rounding(exact, two_rounds(spec, like=exact))


@pytest.mark.full(but=2)
@pytest.mark.parametrize("name", ["scaffold", "adam", "fedsimclr", "feddecorr", "orchestra"])
def test_a_missed_step_changes_the_course_of_training(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = two_rounds_spec(name)
    exact = two_rounds(spec)
    take_step, taken = steps.take_step, itertools.count()
    monkeypatch.setattr(steps, "take_step", lambda *args: take_step(*args) if next(taken) != 4 else None)
    with pytest.raises(AssertionError):
        assert_equal_up_to_rounding(exact, two_rounds(spec, like=exact))


@pytest.mark.full
@pytest.mark.parametrize("name", ["fedbyol", "adam", "orchestra"])
def test_a_second_epoch_records_nothing(name: str, programs: list[_Program]) -> None:
    """Therefore tests/gpu can forbid all synchronisation inside a second epoch."""

    @contextmanager
    def nothing_new() -> Iterator[None]:
        before = len(programs)
        assert before
        yield
        assert len(programs) == before

    spec = two_rounds_spec(name, local_epochs=2)
    two_rounds(spec)
    assert bool(two_epochs(spec, "cpu", nothing_new()).isfinite().all())


@pytest.mark.full
def test_adam_is_recorded_too(programs: list[_Program]) -> None:
    two_rounds(two_rounds_spec("adam"))
    assert len(programs) == 1
    assert type(_Steps.current._optimizer).__name__ == "Adam"


def test_a_step_is_recorded_once_after_some_eager_steps(programs: list[_Program]) -> None:
    spec = two_rounds_spec("fedsimclr")
    two_rounds(spec)
    assert len(programs) == 1
    sizes = [len(client_data(spec, client)) for client in CLIENTS]
    whole = sum(size // 16 for size in sizes)  # incomplete batches are eager
    assert any(size % 16 >= 2 for size in sizes)
    assert _Steps.current.num_replays == whole - NUM_EAGER_STEPS


@pytest.mark.full
def test_a_new_learning_rate_is_recorded_again(programs: list[_Program]) -> None:
    two_rounds(two_rounds_spec("scaffold", schedule="cosine"))
    assert len(programs) == 2


@pytest.mark.full
def test_a_queue_of_another_length_is_recorded_again(programs: list[_Program]) -> None:
    """The length of FedMoCo's queue follows the number of images, which differs between the clients."""
    two_rounds(two_rounds_spec("fedmoco"))
    assert len(programs) == 2


@pytest.mark.parametrize("wanted", ["eager", "recorded"])
def test_the_spec_can_ask_for_eager_or_recorded_steps(wanted: str, programs: list[_Program]) -> None:
    spec = two_rounds_spec("fedsimclr")
    spec = spec.model_copy(update={"training": spec.training.model_copy(update={"gpu_steps": wanted})})
    local_round(spec, start(spec).broadcast)
    assert len(programs) == (wanted == "recorded")


def test_a_step_that_cannot_be_recorded_is_taken_eagerly_with_one_warning(
    programs: list[_Program], monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = two_rounds_spec("fedsimclr")
    recorded = two_rounds(spec)
    release_trainer()

    def refuse(*args: Any) -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(cuda_graphs, "_Capture", refuse)
    with pytest.warns(UserWarning, match="cannot be recorded and is taken eagerly: operation not permitted") as told:
        eager = two_rounds(spec)
    assert len(told) == 1
    for one, two in zip(recorded, eager, strict=True):
        assert all(torch.equal(one.update[name], two.update[name]) for name in one.update)


def test_running_out_of_memory_during_a_recording_is_raised(
    programs: list[_Program], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(cuda_graphs, "_Capture", fail)
    spec = two_rounds_spec("fedsimclr")
    broadcast = start(spec).broadcast
    with pytest.raises(torch.OutOfMemoryError):
        local_round(spec, broadcast)
    assert trainer_module._idle == {}


@pytest.mark.parametrize("name", ["sgd", "adam", "adamw", "lars"])
def test_a_restarted_optimizer_steps_like_a_new_one(name: str) -> None:
    config = OptimizerConfig.model_validate({"name": name, "learning_rate": 0.1})
    generator = torch.Generator().manual_seed(0)
    gradients = torch.randn(6, 5, generator=generator)
    results = []
    for used in (False, True):
        modules = nn.ModuleDict({"net": nn.Linear(5, 1, bias=False)})
        optimizer = optimizer_for(modules, config, 0.3 if used else 0.1)
        weight = modules["net"].weight
        for gradient in gradients[:3] if used else ():
            weight.grad = gradient[None].clone()
            optimizer.step()
        restart(optimizer, 0.1)
        with torch.no_grad():
            weight.fill_(1)
        for gradient in gradients[3:]:
            weight.grad = gradient[None].clone()
            optimizer.step()
        results.append(weight.detach().clone())
    assert torch.equal(*results)


@pytest.mark.parametrize("deterministic", [False, True])
def test_cudnn_benchmarks_its_algorithms_only_in_whole_batches(
    programs: list[_Program], monkeypatch: pytest.MonkeyPatch, *, deterministic: bool
) -> None:
    seen, take_step = [], steps.take_step

    def look(optimizer: torch.optim.Optimizer, total: torch.Tensor, max_gradient_norm: float | None) -> None:
        seen.append((torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic))
        take_step(optimizer, total, max_gradient_norm)

    monkeypatch.setattr(steps, "take_step", look)
    monkeypatch.setattr(local, "exact_float32", lambda device, **given: exact_float32("cuda", **given))
    before = torch.backends.cudnn.benchmark
    spec = two_rounds_spec("fedsimclr", gpu_steps="eager")
    spec = spec.model_copy(update={"training": spec.training.model_copy(update={"deterministic": deterministic})})
    local_round(spec, start(spec).broadcast)
    assert seen == [(not deterministic, deterministic)] * (len(seen) - 1) + [(before, deterministic)]
    assert torch.backends.cudnn.benchmark == before
    assert not torch.backends.cudnn.deterministic


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make torch's recording fail at its end, as on a GPU that does not permit an operation of the step."""

    class Graph:
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            assert kwargs["pool"] == (0, 7)

        def __enter__(self) -> None: ...

        def __exit__(self, *args: object) -> None:
            raise RuntimeError("operation failed due to a previous error during capture")

    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: None)
    monkeypatch.setattr(torch.cuda, "graph", Graph)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 7))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)


def _not_permitted(batch: Batch) -> StepValues:
    raise RuntimeError("operation not permitted when stream is capturing")


def test_a_failed_recording_releases_its_memory_pool(failing: None, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[Any, ...]] = []
    for name in ("_cuda_endAllocateToPool", "_cuda_releasePool"):
        monkeypatch.setattr(torch._C, name, lambda *args, name=name: calls.append((name, *args)), raising=False)
    client = training(method_spec("fedbyol"))
    with pytest.raises(RuntimeError, match="previous error") as caught:
        cuda_graphs._Capture(_not_permitted, client.batch(), client.modules)
    assert "not permitted" in str(caught.value.__context__)
    assert calls == [("_cuda_endAllocateToPool", 1, (0, 7)), ("_cuda_releasePool", 1, (0, 7))]


def test_a_failed_recording_whose_pool_cannot_be_released_ends_the_round(
    failing: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(torch._C, "_cuda_releasePool", raising=False)
    client = training(method_spec("fedbyol"))
    with pytest.raises(MethodError, match='gpu_steps = "eager"'):
        cuda_graphs._Capture(_not_permitted, client.batch(), client.modules)


def _algorithm(name: str) -> ClientAlgorithm:
    spec = two_rounds_spec(name)
    return METHODS[spec.method.name].bind(spec).client


def test_long_runs_are_compiled_and_short_ones_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    spec, algorithm = method_spec("fedsimclr", num_rounds=100), _algorithm("fedsimclr")
    monkeypatch.setenv("CC", "cc")
    assert not wants_compiling(algorithm, spec, COMPILE_FROM // 100 - 1)
    assert wants_compiling(algorithm, spec, COMPILE_FROM // 100)
    for wanted in ("eager", "recorded", "compiled"):
        changed = spec.model_copy(update={"training": spec.training.model_copy(update={"gpu_steps": wanted})})
        assert wants_compiling(algorithm, changed, 10**6) == (wanted == "compiled")
    changed = spec.model_copy(update={"training": spec.training.model_copy(update={"deterministic": True})})
    assert not wants_compiling(algorithm, changed, 10**6)


def test_nothing_is_compiled_by_default_without_a_c_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CC", raising=False)
    found = ["clang"]
    monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}" if name in found else None)
    spec, algorithm = method_spec("fedsimclr"), _algorithm("fedsimclr")
    assert wants_compiling(algorithm, spec, COMPILE_FROM)
    found.clear()
    assert not wants_compiling(algorithm, spec, COMPILE_FROM)
    asked = spec.model_copy(update={"training": spec.training.model_copy(update={"gpu_steps": "compiled"})})
    assert wants_compiling(algorithm, asked, 1)


NOT_COMPILED = {"fedmae", "fedmoco", "fedprotocl", "fedx on fedmoco", "fedu2", "flesd, an encoder of its own"}


def test_methods_whose_step_differs_between_clients_are_not_compiled_by_default(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CC", "cc")
    left = {name for name in ALL_COMBINATIONS if not wants_compiling(_algorithm(name), two_rounds_spec(name), 10**6)}
    assert left == NOT_COMPILED


@pytest.mark.full
@pytest.mark.parametrize("name", sorted(set(ALL_COMBINATIONS) - NOT_COMPILED))
def test_other_methods_have_the_same_step_for_every_client(name: str) -> None:
    clients = [training(two_rounds_spec(name), client) for client in CLIENTS]
    one, two = (client.algorithm.step_constants(client.modules, client.ctx) for client in clients)
    assert one == two


COMPILED = ("fedsimclr", "ssd", "fedprotocl", "fedrlc", "fedx", "orchestra")


@pytest.mark.parametrize("name", methods_of_this_run(COMPILED))
def test_the_compiler_captures_a_step_as_one_graph(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiler's own backend is left out: the minute that it takes is worth it only on a GPU."""
    compiler = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, **kwargs: compiler(f, backend="eager", fullgraph=True, **kwargs))
    one, two = (training(method_spec(name), number=2) for _ in range(2))
    for client in (one, two):
        client.algorithm.begin_epoch(client.modules, client.data, 0, client.ctx)
    batch = one.batch()
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        one.algorithm.before_step(one.modules, one.ctx)
        found = compiled(one.algorithm.objective)(one.modules, batch, one.ctx)
    for terms, expected in zip(found, two.terms(batch), strict=True):
        assert terms.keys() == expected.keys()
        for term in terms:
            torch.testing.assert_close(terms[term], expected[term])
    torch.compiler.reset()


def test_a_step_that_cannot_be_compiled_runs_eagerly_after_one_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._dynamo.exc import BackendCompilerFailed

    def no_compiler(*args: Any) -> Any:
        raise BackendCompilerFailed(no_compiler, OSError("no C compiler"), None)

    monkeypatch.setattr(torch, "compile", lambda objective, **kwargs: no_compiler)
    client = training(method_spec("fedsimclr"))
    objective = compiled(client.algorithm.objective)
    batch = client.batch()
    with pytest.warns(UserWarning, match="cannot be compiled"):
        objective(client.modules, batch, client.ctx)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        objective(client.modules, batch, client.ctx)


@pytest.fixture
def no_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the compiler fail at the backward pass."""
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    def no_compiler(*args: Any) -> Any:
        raise OSError("no C compiler")

    backend = aot_autograd(fw_compiler=lambda graph, _: make_boxed_func(graph.forward), bw_compiler=no_compiler)
    compiler = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, **kwargs: compiler(f, backend=backend, **kwargs))


@pytest.mark.full
def test_a_backward_pass_that_cannot_be_compiled_runs_eagerly(no_backward: None) -> None:
    one, two = (training(method_spec("fedsimclr")) for _ in range(2))
    objective, batch = compiled(one.algorithm.objective), one.batch()
    with pytest.warns(UserWarning, match="cannot be compiled"):
        total = total_loss(objective(one.modules, batch, one.ctx)[0])
    total.backward()  # type: ignore[no-untyped-call]
    total_loss(two.losses(batch)).backward()  # type: ignore[no-untyped-call]
    for found, expected in zip(one.modules.parameters(), two.modules.parameters(), strict=True):
        torch.testing.assert_close(found.grad, expected.grad, rtol=0, atol=0)
    torch.compiler.reset()


@pytest.mark.full
def test_the_compilers_tf32_advice_is_suppressed(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor.compile_fx import _warn_tf32_disabled

    def advising(objective: Any, **kwargs: Any) -> Any:
        def fused(*args: Any) -> Any:
            _warn_tf32_disabled.__wrapped__()
            return objective(*args)

        return fused

    monkeypatch.setattr(torch, "compile", advising)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    client = training(method_spec("fedsimclr"))
    objective = compiled(client.algorithm.objective)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        objective(client.modules, client.batch(), client.ctx)
