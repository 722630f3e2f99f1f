"""Recorded steps do what eager ones do.

Without a GPU, torch.fx stands in for the CUDA graph: it too turns a step into a list of kernels on fixed memory, in
which nothing is left of Python. The tests at the end need a GPU.
"""

import dataclasses
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

from fedssl.engine import LocalResult, recording, release_trainer, run_local_round
from fedssl.engine import trainer as trainer_module
from fedssl.engine.optimization import optimizer_for, restart
from fedssl.engine.recording import COMPILE_FROM, NUM_EAGER_STEPS, RecordedSteps, compiled, wants_compiling
from fedssl.engine.steps import Step, Terms
from fedssl.methods import METHODS
from fedssl.methods.api import Batch, ClientData
from fedssl.methods.composition import ComposedClient
from fedssl.protocol.runs import RunSpec
from fedssl.protocol.training import OptimizerConfig
from support.combinations import ALL_COMBINATIONS, combined_spec
from support.methods import context, method_spec
from support.rounds import aggregate, client_data, local_round, start, training

CLIENTS = ("client-0", "client-1")


class _Steps(RecordedSteps):
    """Counts, and shows a stand-in the optimiser's memory."""

    current: "_Steps"

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.num_replays = 0

    def _replay(self, step: Step, batch: Batch) -> Terms:
        _Steps.current = self
        self.num_replays += 1
        return super()._replay(step, batch)


class _Program:
    """A recording that needs no GPU."""

    made: list["_Program"] = []

    def __init__(self, step: Step, batch: Batch, modules: nn.ModuleDict) -> None:
        copies = [tensor.clone() for tensor in recording._tensors(batch)]
        views, extra = len(batch.views), len(batch.extra)
        self._places = copies
        self._batch = dataclasses.replace(
            batch,
            views=tuple(copies[:views]),
            indices=copies[views],
            labels=None if batch.labels is None else copies[views + 1],
            extra=dict(zip(batch.extra, copies[len(copies) - extra :], strict=True)),
        )
        memory = [*modules.state_dict().values(), *_state(_Steps.current._optimizer)]
        before = [tensor.clone() for tensor in memory]
        generators = recording._generators(modules)
        drawn = [generator.get_state() for generator in generators]
        found: list[Terms] = []

        def values() -> torch.Tensor:
            found.append(step(self._batch))
            return found[-1].values

        self._program = make_fx(values)()
        self._names = found[-1].names
        # Tracing takes the step, recording does not.
        for tensor, value in zip(memory, before, strict=True):
            tensor.detach().copy_(value)
        for generator, state in zip(generators, drawn, strict=True):
            generator.set_state(state)
        self.made.append(self)

    @torch.no_grad()
    def replay(self, batch: Batch) -> Terms:
        for place, tensor in zip(self._places, recording._tensors(batch), strict=True):
            place.copy_(tensor)
        return Terms(self._names, self._program())


def _state(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [value for state in optimizer.state.values() for value in state.values() if torch.is_tensor(value)]


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[_Program]]:
    """Records on the CPU; the recordings made."""
    release_trainer()
    _Program.made = []
    monkeypatch.setattr(trainer_module, "can_record", lambda device: True)
    monkeypatch.setattr(trainer_module, "RecordedSteps", _Steps)
    monkeypatch.setattr(recording, "_Recording", _Program)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", torch.backends.cudnn.benchmark)
    yield _Program.made
    release_trainer()


def _spec(name: str, **optimizer: Any) -> RunSpec:
    training = {"batch_size": 16, "local_epochs": 1, "drop_last": False, "optimizer": {"name": "sgd", **optimizer}}
    return combined_spec(name, training=training)


def _two_rounds(spec: RunSpec, device: str = "cpu") -> list[LocalResult]:
    """One client in the first, another in the second."""
    now, results = start(spec), []
    for number, client in enumerate(CLIENTS, 1):
        ctx, data = _on(device, context(spec, number, client)), _moved(client_data(spec, client), device)
        result = run_local_round(METHODS[spec.method.name], now.broadcast, None, data, ctx)
        now = aggregate(spec, now.state, [(result.num_examples, result.update)], number)
        results.append(result)
    return results


def _on(device: str, ctx: Any) -> Any:
    public = None if ctx.public is None else _moved(ctx.public, device)
    return dataclasses.replace(ctx, device=torch.device(device), public=public)


def _moved(data: ClientData, device: str) -> ClientData:
    return ClientData(data.images.to(device), None if data.labels is None else data.labels.to(device))


@pytest.mark.parametrize("name", ALL_COMBINATIONS)
def test_a_recording_serves_other_batches_rounds_and_clients(name: str, programs: list[_Program]) -> None:
    spec = _spec(name)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer_module, "can_record", lambda device: False)
        eager = _two_rounds(spec)
    release_trainer()
    recorded = _two_rounds(spec)
    assert programs
    for one, two in zip(eager, recorded, strict=True):
        for part in ("update", "state"):
            a, b = getattr(one, part), getattr(two, part)
            assert [tensor for tensor in a if not torch.equal(a[tensor], b[tensor])] == []
        assert one.metrics == pytest.approx(two.metrics, rel=1e-6)


def test_it_is_made_once_after_some_eager_steps(programs: list[_Program]) -> None:
    spec = _spec("fedsimclr")
    _two_rounds(spec)
    assert len(programs) == 1
    sizes = [len(client_data(spec, client)) for client in CLIENTS]
    whole = sum(size // 16 for size in sizes)  # incomplete batches are eager
    assert any(size % 16 >= 2 for size in sizes)
    assert _Steps.current.num_replays == whole - NUM_EAGER_STEPS


def test_a_new_learning_rate_is_recorded_anew(programs: list[_Program]) -> None:
    _two_rounds(_spec("scaffold", schedule="cosine"))
    assert len(programs) == 2


def test_a_queue_of_another_length_is_recorded_anew(programs: list[_Program]) -> None:
    """FedMoCo's queue follows the number of images, which differs between the clients."""
    _two_rounds(_spec("fedmoco"))
    assert len(programs) == 2


@pytest.mark.parametrize("wanted", ["eager", "recorded"])
def test_the_spec_can_ask_for_eager_steps(wanted: str, programs: list[_Program]) -> None:
    spec = _spec("fedsimclr")
    spec = spec.model_copy(update={"training": spec.training.model_copy(update={"gpu_steps": wanted})})
    local_round(spec, start(spec).broadcast)
    assert len(programs) == (wanted == "recorded")


def test_a_step_that_cannot_be_recorded_is_eager(programs: list[_Program], monkeypatch: pytest.MonkeyPatch) -> None:
    spec = _spec("fedbyol")
    recorded = _two_rounds(spec)
    release_trainer()

    def refuse(*args: Any) -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(recording, "_Recording", refuse)
    with pytest.warns(UserWarning, match="cannot be recorded and is taken eagerly: operation not permitted") as told:
        eager = _two_rounds(spec)
    assert len(told) == 1
    for one, two in zip(recorded, eager, strict=True):
        assert all(torch.equal(one.update[name], two.update[name]) for name in one.update)


def test_running_out_of_memory_is_not_taken_for_that(programs: list[_Program], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(recording, "_Recording", fail)
    spec = _spec("fedsimclr")
    broadcast = start(spec).broadcast
    with pytest.raises(torch.OutOfMemoryError):
        local_round(spec, broadcast)
    assert trainer_module._idle == {}


@pytest.mark.parametrize("name", ["sgd", "adam", "adamw"])
def test_a_restarted_optimizer_is_as_new(name: str) -> None:
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


def test_long_runs_are_compiled_and_short_ones_are_not() -> None:
    spec = method_spec("fedsimclr", num_rounds=100)
    assert not wants_compiling(spec, COMPILE_FROM // 100 - 1)
    assert wants_compiling(spec, COMPILE_FROM // 100)
    for wanted in ("eager", "recorded", "compiled"):
        changed = spec.model_copy(update={"training": spec.training.model_copy(update={"gpu_steps": wanted})})
        assert wants_compiling(changed, 10**6) == (wanted == "compiled")


@pytest.mark.parametrize("name", ["fedsimclr", "ssd", "fedprotocl", "fedrlc", "fedx", "orchestra"])
def test_the_compiler_takes_a_step_in_one_piece(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to its backend, which needs a GPU to be worth its minute."""
    compiler = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, **kwargs: compiler(f, backend="eager", fullgraph=True, **kwargs))
    one, two = (training(method_spec(name), number=2) for _ in range(2))
    for client in (one, two):
        client.algorithm.begin_epoch(client.modules, client.data, 0, client.ctx)
    batch = one.batch()
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        found = compiled(one.algorithm.objective)(one.modules, batch, one.broadcast, one.ctx)
    expected = two.losses(batch)
    assert found.keys() == expected.keys()
    for term in found:
        torch.testing.assert_close(found[term], expected[term])
    torch.compiler.reset()


def test_a_step_that_cannot_be_compiled_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._dynamo.exc import BackendCompilerFailed

    def no_compiler(*args: Any) -> Any:
        raise BackendCompilerFailed(no_compiler, OSError("no C compiler"), None)

    monkeypatch.setattr(torch, "compile", lambda objective, **kwargs: no_compiler)
    client = training(method_spec("fedsimclr"))
    objective = compiled(client.algorithm.objective)
    batch = client.batch()
    with pytest.warns(UserWarning, match="cannot be compiled"):
        objective(client.modules, batch, client.broadcast, client.ctx)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        objective(client.modules, batch, client.broadcast, client.ctx)


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def _on_gpu(name: str, wanted: str) -> RunSpec:
    spec = _spec(name)
    return spec.model_copy(update={"training": spec.training.model_copy(update={"gpu_steps": wanted})})


@needs_gpu
@pytest.mark.parametrize("wanted", ["recorded", "compiled"])
@pytest.mark.parametrize("name", ALL_COMBINATIONS)
def test_a_gpus_recorded_steps_are_its_eager_ones(name: str, wanted: str) -> None:
    if wanted == "compiled" and name not in ("fedsimclr", "ssd", "fedrlc", "fedu2"):
        pytest.skip("one of each kind is compiled")
    release_trainer()
    eager = _two_rounds(_on_gpu(name, "eager"), "cuda")
    release_trainer()
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        recorded = _two_rounds(_on_gpu(name, wanted), "cuda")
    for one, two in zip(eager, recorded, strict=True):
        assert two.metrics["loss"] == pytest.approx(one.metrics["loss"], rel=1e-2, abs=1e-3)
        for tensor in one.update:
            torch.testing.assert_close(two.update[tensor].float(), one.update[tensor].float(), rtol=2e-2, atol=2e-3)


@needs_gpu
@pytest.mark.parametrize("name", ALL_COMBINATIONS)
def test_a_gpu_is_not_waited_for_inside_an_epoch(name: str) -> None:
    spec = _on_gpu(name, "recorded")
    spec = spec.model_copy(update={"training": spec.training.model_copy(update={"local_epochs": 2})})
    release_trainer()
    _two_rounds(spec, "cuda")
    method, ctx = METHODS[spec.method.name], _on("cuda", context(spec, 2, "client-0"))
    data = _moved(client_data(spec, "client-0"), "cuda")
    broadcast = start(spec).broadcast
    with trainer_module.borrow_trainer(method, ctx) as trainer, recording.on_own_stream(ctx.device):
        algorithm, modules = trainer.algorithm, trainer.modules
        assert isinstance(algorithm, ComposedClient)
        algorithm.merge(modules, broadcast, None, data, ctx)
        step = trainer.start_round(broadcast, algorithm.schedule(len(data), ctx), ctx)
        for epoch in range(2):
            algorithm.begin_epoch(modules, data, epoch, ctx)
            if epoch == 1:
                torch.cuda.set_sync_debug_mode("error")
            try:
                sums = torch.zeros((), device="cuda")
                for batch in algorithm.batches(data, epoch, ctx):
                    sums = sums + step(batch).values
            finally:
                torch.cuda.set_sync_debug_mode("default")
        assert bool(sums.isfinite().all())


@needs_gpu
def test_a_gpu_records_once_for_all_clients_and_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    original = recording._Recording

    class Counted(original):  # type: ignore[misc, valid-type]
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            made.append(self)

    monkeypatch.setattr(recording, "_Recording", Counted)
    release_trainer()
    _two_rounds(_on_gpu("fedbyol", "recorded"), "cuda")
    assert len(made) == 1
