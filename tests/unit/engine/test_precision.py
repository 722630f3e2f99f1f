"""bf16 is only for networks: losses, divergences and normalisations are computed in float32 even under autocast."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from fedssl.engine import run_aggregation
from fedssl.engine.optimization import autocast, total_loss
from fedssl.engine.steps import eager_step
from fedssl.methods import METHODS
from fedssl.methods.api import Update
from fedssl.models.encoders import Encoder
from fedssl.precision import exact_float32
from fedssl.protocol.training import TrainingConfig
from fedssl.simulation import simulate
from support.combinations import ALL_COMBINATIONS, combined_spec
from support.methods import context, method_spec, methods_of_this_run, shards
from support.rounds import Training, local_round, start, training

# Operations that move numbers or change their precision without computing any.
MOVES = {
    "_to_copy", "_unsafe_view", "alias", "cat", "clone", "copy_", "detach", "empty_like", "expand", "select", "slice",
    "split", "stack", "t", "transpose", "unbind", "unsqueeze", "view",
}  # fmt: skip


class _Bf16Mathematics(TorchDispatchMode):
    """Records the operations that computed something in bf16 outside the networks."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()
        self.inside = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        name = function.overloadpacket.__name__
        tensors = [x for x in (*args, result) if isinstance(x, torch.Tensor)]
        if not self.inside and name not in MOVES and any(x.dtype == torch.bfloat16 for x in tensors):
            self.seen.add(name)
        return result


@contextmanager
def _watched(modules: nn.Module) -> Iterator[_Bf16Mathematics]:
    """Watch for bf16 outside the networks, which are torch's layers and everything inside encoders.

    A method's own modules, such as cluster centers, do not count as networks.
    """
    mode = _Bf16Mathematics()

    def enter(*_: Any) -> None:
        mode.inside += 1

    def leave(*_: Any) -> None:
        mode.inside -= 1

    of_encoders = {m for encoder in modules.modules() if isinstance(encoder, Encoder) for m in encoder.modules()}
    networks = [m for m in modules.modules() if m in of_encoders or type(m).__module__.startswith("torch.nn")]
    networks = [m for m in networks if not isinstance(m, nn.ModuleDict)]
    handles = [m.register_forward_pre_hook(enter) for m in networks] + [
        m.register_forward_hook(leave) for m in networks
    ]
    try:
        with mode:
            yield mode
    finally:
        for handle in handles:
            handle.remove()


def _client(name: str) -> Training:
    client = training(combined_spec(name, training={"batch_size": 32, "precision": "bf16"}), number=2)
    client.algorithm.begin_epoch(client.modules, client.data, 0, client.ctx)
    return client


@pytest.mark.parametrize("name", methods_of_this_run(ALL_COMBINATIONS))
def test_only_the_networks_compute_in_bf16(name: str) -> None:
    client = _client(name)
    batch = client.batch()
    with _watched(client.modules) as watch, autocast(client.ctx):
        losses = client.losses(batch)
        total_loss(losses)
    assert watch.seen == set()
    assert all(view.dtype == torch.float32 for view in batch.views)


@pytest.mark.parametrize("name", methods_of_this_run(ALL_COMBINATIONS))
def test_losses_and_gradients_are_near_those_of_float32(name: str) -> None:
    exact, rounded = _client(name), _client(name)
    batch = exact.batch()
    with autocast(rounded.ctx):
        found = rounded.losses(batch)
        total = total_loss(found)
    expected = exact.losses(batch)
    assert total.dtype == torch.float32
    for term in expected:
        torch.testing.assert_close(found[term].float(), expected[term], rtol=0.05, atol=0.02)
    total.backward()  # type: ignore[no-untyped-call]
    total_loss(expected).backward()  # type: ignore[no-untyped-call]
    one, two = (_gradient(client.modules) for client in (exact, rounded))
    assert float(torch.nn.functional.cosine_similarity(one, two, dim=0)) > 0.95


def _gradient(modules: nn.Module) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for p in modules.parameters() if p.grad is not None])


@pytest.mark.full(but=2)
@pytest.mark.parametrize("name", ["fedsimclr", "fedca", "flesd", "orchestra"])
def test_a_run_in_bf16_stays_finite_and_is_reproducible(name: str) -> None:
    spec = method_spec(name, training={"batch_size": 32, "precision": "bf16"})
    first, again = simulate(spec, shards(spec)), simulate(spec, shards(spec))
    assert all(bool(tensor.isfinite().all()) and tensor.dtype != torch.bfloat16 for tensor in first.model.values())
    assert all(torch.equal(first.model[tensor], again.model[tensor]) for tensor in first.model)


def test_the_targets_of_a_distillation_are_float32() -> None:
    """They are the views, the ensemble, and the student's divergence from it."""
    spec = method_spec("flesd", training={"batch_size": 32, "precision": "bf16"})
    first = start(spec)
    update = local_round(spec, first.broadcast).update
    results = []
    for precision in ("bf16", "fp32"):
        changed = spec.model_copy(update={"training": spec.training.model_copy(update={"precision": precision})})
        updates = [Update("client-0", 10, lambda: update)]
        results.append(run_aggregation(METHODS["flesd"], first.state, updates, context(changed, 1)))
    losses = [result.metrics["distillation_loss"] for result in results]
    assert losses[0] == pytest.approx(losses[1], rel=0.02)


def test_steps_report_float32_values() -> None:
    client = _client("fedbyol")
    optimizer = torch.optim.SGD([p for p in client.modules.parameters() if p.requires_grad], lr=0.1)
    before = copy.deepcopy(client.modules)
    step = eager_step(client.algorithm, client.modules, optimizer, client.ctx)
    names, values = step(client.batch())
    assert names == ("loss/regression", "loss")
    assert values.dtype == torch.float32
    assert not values.requires_grad
    assert values[0] == values[1]
    changed = zip(before["encoder"].parameters(), client.modules["encoder"].parameters(), strict=True)
    assert all(not torch.equal(old, new) for old, new in changed)


def test_float32_is_exact_on_a_gpu_and_the_settings_are_restored() -> None:
    def settings() -> tuple[object, ...]:
        cudnn = torch.backends.cudnn
        return cudnn.allow_tf32, cudnn.benchmark, cudnn.enabled, torch.backends.cuda.matmul.allow_tf32

    torch.set_float32_matmul_precision("high")
    try:
        before = settings()
        assert before[-1]
        with exact_float32(torch.device("cuda")):
            assert settings() == (False, *before[1:3], False)
            torch.backends.cudnn.benchmark = True
        assert settings() == before
        with exact_float32(torch.device("cpu")):
            assert settings() == before
    finally:
        torch.set_float32_matmul_precision("highest")


def test_deterministic_training_is_omitted_from_older_specs_and_cannot_be_compiled() -> None:
    assert "deterministic" not in TrainingConfig().model_dump()
    with pytest.raises(ValidationError, match="set gpu_steps to recorded or eager"):
        TrainingConfig(deterministic=True, gpu_steps="compiled")
