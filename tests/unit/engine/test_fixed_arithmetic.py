"""A round in fixed-point arithmetic: what equals the floating-point result, and values that do not fit."""

import pytest
import torch

from fedssl.aggregation.fixed_point import EQUAL_BITS, FixedPointSum
from fedssl.aggregation.layerwise import capped_cosines
from fedssl.artifacts.tensors import Tensors
from fedssl.engine import run_aggregation, start_run
from fedssl.engine.aggregation import ServerResult, ValueOutOfRange
from fedssl.methods import METHODS
from fedssl.methods.api import Update
from fedssl.protocol.runs import RunSpec
from fedssl.simulation import simulate
from support.methods import context, method_spec, shards


def _fixed(name: str, **changes: object) -> RunSpec:
    return method_spec(name, aggregation={"arithmetic": "fixed"}, **changes)


def _moved(broadcast: Tensors, seed: int, names: set[str] | None = None) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: t + 0.01 * torch.randn(t.shape, generator=generator) if t.is_floating_point() else t + seed
        for name, t in broadcast.items()
        if names is None or name in names
    }


def _aggregated(spec: RunSpec, sent: list[Tensors], number: int = 1) -> ServerResult:
    method = METHODS[spec.method.name]
    state = start_run(method, context(spec, 0)).state
    updates = [
        Update(f"client-{index}", 10 + index, lambda tensors=tensors: tensors)  # type: ignore[misc]
        for index, tensors in enumerate(sent)
    ]
    return run_aggregation(method, state, updates, context(spec, number))


def _broadcast(spec: RunSpec) -> Tensors:
    return start_run(METHODS[spec.method.name], context(spec, 0)).broadcast


def _first_float(tensors: Tensors) -> str:
    return next(name for name, tensor in tensors.items() if tensor.is_floating_point())


@pytest.mark.parametrize("weighting", ["examples", "batches", "uniform"])
def test_the_mean_equals_that_of_float_up_to_rounding(weighting: str) -> None:
    method = {"name": "fedsimclr", "reducer": {"name": "mean", "weighting": weighting}}
    spec = _fixed("fedsimclr", method=method)
    sent = [_moved(_broadcast(spec), seed) for seed in range(1, 4)]
    fixed = _aggregated(spec, sent).broadcast
    plain = _aggregated(method_spec("fedsimclr", method=method), sent).broadcast
    for name in plain:
        torch.testing.assert_close(fixed[name], plain[name], atol=2e-7, rtol=2e-7)


def test_ldawa_adds_up_terms_that_each_client_can_compute() -> None:
    method = {"name": "ldawa", "reducer": {"name": "ldawa", "num_plain_rounds": 0}}
    spec = _fixed("ldawa", method=method)
    base = _broadcast(spec)
    sent = [_moved(base, seed) for seed in range(1, 4)]
    total = FixedPointSum(base, fraction_bits=EQUAL_BITS, num_clients=3)
    for update in reversed(sent):
        part = FixedPointSum(base, fraction_bits=EQUAL_BITS, num_clients=3)
        part.add(update, 1, capped_cosines(base))
        total.merge(part)
    expected, found = total.mean(), _aggregated(spec, sent).broadcast
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    plain = _aggregated(method_spec("ldawa", method=method), sent).broadcast
    for name in plain:
        torch.testing.assert_close(found[name], plain[name], atol=2e-7, rtol=2e-7)


@pytest.mark.parametrize("wrong", ["counter", "weight", "control", "not finite too"])
def test_a_value_out_of_range_costs_only_its_client_s_update(wrong: str) -> None:
    """Such a value used to end every round without a result, and only the tensor was named."""
    method = {"name": "fedsimclr", "add_ons": [{"name": "scaffold"}]}
    spec = _fixed("fedsimclr", method=method)
    base = _broadcast(spec)
    plan = METHODS["fedsimclr"].bind(spec).plan.update
    kind, dtype = {"control": ("control", "F32"), "counter": ("weights", "I64")}.get(wrong, ("weights", "F32"))
    names = [each.name for each in plan if (each.kind, each.dtype) == (kind, dtype)]
    sent = [
        _moved({each.name: base.get(each.name, torch.zeros(each.shape)) for each in plan}, seed) for seed in range(5)
    ]
    expected = _aggregated(spec, sent[:3])
    sent[3][names[0]].view(-1)[0] = 1 << 52 if wrong == "counter" else 1e9
    sent[4][names[-1]].view(-1)[0] = -(1 << 63) if wrong == "counter" else -1e9
    if wrong == "not finite too":
        sent[4][names[-1]].view(-1)[0] = float("nan")
    result = _aggregated(spec, sent)
    assert result.norms.rejected.keys() == {"client-3", "client-4"}
    assert result.norms.rejected["client-3"].startswith(f"{names[0].removeprefix('control_delta.')}: a value is ")
    assert result.norms.measures.keys() == {f"client-{index}" for index in range(5)}
    for name in expected.state:
        assert torch.equal(result.state[name], expected.state[name]), name


def test_too_few_updates_within_range_give_no_result_and_name_the_rejected_client() -> None:
    spec = _fixed("fedsimclr", cohort={"min_clients": 3, "min_updates": 3})
    sent = [_moved(_broadcast(spec), seed) for seed in range(1, 4)]
    name = _first_float(sent[1])
    sent[1][name].view(-1)[0] = 1e9
    with pytest.raises(
        ValueOutOfRange,
        match=rf"^out of range: {name}: a value is 1e\+09 from .* Without client-1, fewer than 3 updates",
    ) as caught:
        _aggregated(spec, sent)
    assert caught.value.norms.measures["client-1"]["update_norm"] == pytest.approx(1e9)
    assert list(caught.value.norms.rejected) == ["client-1"]
    assert _aggregated(method_spec("fedsimclr"), sent).broadcast  # float has no such limit


def test_updates_are_clipped_before_their_values_are_rounded() -> None:
    spec = _fixed("fedsimclr", robustness={"max_update_norm": 1.0})
    sent = [_moved(_broadcast(spec), seed) for seed in range(1, 4)]
    sent[1][_first_float(sent[1])].view(-1)[0] = 1e9
    result = _aggregated(spec, sent)
    assert list(result.norms.clipped) == ["client-1"]


def test_an_update_that_is_not_finite_is_left_out_as_in_float() -> None:
    spec = _fixed("fedsimclr", cohort={"min_clients": 3, "min_updates": 2})
    sent = [_moved(_broadcast(spec), seed) for seed in range(1, 4)]
    sent[2][_first_float(sent[2])].view(-1)[0] = float("nan")
    result = _aggregated(spec, sent)
    expected = _aggregated(spec, sent[:2]).broadcast
    assert list(result.norms.rejected) == ["client-2"]
    assert all(torch.equal(result.broadcast[name], expected[name]) for name in expected)


def test_a_round_out_of_range_is_skipped_and_no_client_continues_from_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """This holds even if `cohort.without_quorum` ends a run that lacks updates: no update is missing here."""
    monkeypatch.setattr("fedssl.aggregation.fixed_point.LARGEST_EXACT", 1 << 20)
    spec = _fixed("fedbyol")
    result = simulate(spec, shards(spec))
    assert spec.cohort.without_quorum == "fail"
    assert all(str(record.skipped).startswith("out of range: encoder.") for record in result.history)
    assert all(record.updates for record in result.history)
    assert all(torch.equal(result.model[name], result.initial[name]) for name in result.initial)
    assert result.client_states == {}


@pytest.mark.full(but=2)
@pytest.mark.parametrize("name", ["scaffold", "orchestra", "fedema", "fedrlc"])
def test_a_simulation_ends_with_the_loss_of_float_arithmetic(name: str) -> None:
    fixed, plain = (simulate(spec, shards(spec)).history[-1].loss for spec in (_fixed(name), method_spec(name)))
    assert plain is not None
    assert fixed == pytest.approx(plain, rel=1e-3)
