"""The coordinator's optimiser within a round: what it moves, what it keeps, and what is sent."""

from typing import Any

import pytest
import torch
from pydantic import ValidationError

from fedssl.aggregation import fedavgm_step
from fedssl.artifacts.tensors import Tensors
from fedssl.engine.aggregation import ServerResult
from fedssl.protocol.runs import RunSpec
from support.methods import method_spec
from support.rounds import aggregate, start

FEDAVGM = {"name": "fedavgm", "learning_rate": 0.5}
FEDADAM = {"name": "fedadam", "learning_rate": 0.01}


def _spec(optimizer: dict[str, Any] | None, method: str = "fedsimclr", **changes: Any) -> RunSpec:
    chosen = {} if optimizer is None else {"aggregation": {"server_optimizer": optimizer}}
    return method_spec(method, **chosen, **changes)


def _shifted(tensors: Tensors, by: float) -> Tensors:
    return {name: tensor + by if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}


def _two_rounds(spec: RunSpec) -> list[ServerResult]:
    results = [start(spec)]
    for number in (1, 2):
        before = results[-1]
        updates = [(10, _shifted(before.broadcast, 0.5)), (30, _shifted(before.broadcast, 0.25))]
        results.append(aggregate(spec, before.state, updates, number))
    return results


def _own(state: Tensors) -> Tensors:
    return {name: tensor for name, tensor in state.items() if not name.startswith("server_optimizer.")}


@pytest.mark.parametrize("optimizer", [FEDAVGM, FEDADAM])
def test_the_optimisers_state_is_kept_and_not_sent(optimizer: dict[str, Any]) -> None:
    for result in _two_rounds(_spec(optimizer)):
        assert _own(result.state).keys() == result.broadcast.keys()
        moments = 1 if optimizer is FEDAVGM else 2
        weights = [name for name in result.broadcast if name.endswith((".weight", ".bias"))]
        assert len(result.state) - len(result.broadcast) == moments * len(weights)


def test_momentum_carries_over_to_the_next_round() -> None:
    first, second, third = _two_rounds(_spec(FEDAVGM))
    name = next(name for name in first.broadcast if name.endswith(".weight"))
    kept = torch.zeros_like(first.broadcast[name])
    for before, after in ((first, second), (second, third)):
        mean = aggregate(
            _spec(None),
            _own(before.state),
            [(10, _shifted(before.broadcast, 0.5)), (30, _shifted(before.broadcast, 0.25))],
        ).broadcast[name]
        expected, kept = fedavgm_step(before.broadcast[name], mean, kept, learning_rate=0.5, beta=0.9)
        assert torch.equal(after.broadcast[name], expected)


def test_two_rounds_of_fedadam_follow_its_equations_with_moments_that_carry_over() -> None:
    """Every weight's mean moves by d = (10 * 0.5 + 30 * 0.25) / 40 in each round, and v starts from tau^2."""
    first, *rounds = _two_rounds(_spec({"name": "fedadam", "learning_rate": 0.01, "beta_1": 0.9, "beta_2": 0.99}))
    m, v, d, before = 0.0, 1e-6, 0.3125, first.broadcast
    for result in rounds:
        m, v = 0.9 * m + 0.1 * d, 0.99 * v + 0.01 * d**2
        for name in (name for name in before if name.endswith((".weight", ".bias"))):
            moved = result.broadcast[name].double() - before[name].double()
            assert moved.flatten().tolist() == pytest.approx([0.01 * m / (v**0.5 + 1e-3)] * moved.numel(), abs=2e-6)
        before = result.broadcast
    assert (m, v) == pytest.approx((0.059375, 0.00194433), rel=1e-5)


@pytest.mark.parametrize("optimizer", [FEDAVGM, FEDADAM])
def test_batch_norm_statistics_stay_plain_means(optimizer: dict[str, Any]) -> None:
    with_it, without = _two_rounds(_spec(optimizer)), _two_rounds(_spec(None))
    statistics = [name for name in without[1].broadcast if name.rpartition(".")[2].startswith(("running_", "num_"))]
    assert statistics
    for name in statistics:
        assert torch.equal(with_it[1].broadcast[name], without[1].broadcast[name])


def test_fedavgm_at_neutral_settings_changes_nothing() -> None:
    neutral = {"name": "fedavgm", "learning_rate": 1, "beta_1": 0}
    for found, expected in zip(_two_rounds(_spec(neutral)), _two_rounds(_spec(None)), strict=True):
        assert all(torch.equal(found.broadcast[name], tensor) for name, tensor in expected.broadcast.items())


def test_control_variates_have_no_optimiser_state() -> None:
    spec = _spec(FEDADAM, "scaffold")
    result = start(spec)
    assert any(name.startswith("control.") for name in result.broadcast)
    assert not [name for name in result.state if name.startswith("server_optimizer.") and ".control." in name]


def test_only_the_trained_parts_have_moments_if_the_rest_is_frozen() -> None:
    spec = _spec(FEDAVGM)
    model = spec.model.model_copy(update={"trainable": ("blocks.1.*",)})
    everything, part = start(spec).state, start(spec.model_copy(update={"model": model})).state
    moments = [name for name in part if name.startswith("server_optimizer.")]
    assert 0 < len(moments) < len([name for name in everything if name.startswith("server_optimizer.")])
    assert not [name for name in moments if ".encoder.blocks.0." in name]


@pytest.mark.parametrize(
    ("method", "why"),
    [
        ("flesd", "uses each client's similarities by themselves"),
        ("single", "method.reducer none combines nothing"),
        ("fedu2", "method.reducer eua compares each update with every other one"),
    ],
)
def test_methods_without_a_sum_refuse_a_server_optimiser(method: str, why: str) -> None:
    chosen = method_spec(method).model_dump()
    with pytest.raises(ValidationError, match=f"aggregation.server_optimizer needs .* weighted sums.*{why}"):
        RunSpec.model_validate({**chosen, "aggregation": {"server_optimizer": FEDAVGM}})


@pytest.mark.parametrize("wrong", [{"learning_rate": 0}, {"beta_1": 1}, {"beta_2": -0.1}, {"tau": 0}])
def test_settings_out_of_range_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValidationError, match=next(iter(wrong))):
        _spec({**FEDADAM, **wrong})


def test_a_spec_without_a_server_optimiser_is_serialised_as_before() -> None:
    assert "aggregation" not in _spec(None).model_dump(mode="json")
    fixed = _spec(None, aggregation={"arithmetic": "fixed"})
    assert fixed.model_dump(mode="json")["aggregation"] == {"arithmetic": "fixed"}
