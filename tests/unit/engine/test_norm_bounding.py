"""Updates that are too far from the broadcast are clipped to the bound or left out, and reported by client."""

import math
from typing import Any

import pytest
import torch

from fedssl.artifacts.tensors import Tensors
from fedssl.engine import run_aggregation, start_run
from fedssl.engine.aggregation import ServerResult
from fedssl.engine.norm_bounding import TooFewUpdates
from fedssl.errors import SpecError
from fedssl.methods import METHODS
from fedssl.methods.api import Context, Update
from support.methods import method_spec

CLIP, REJECT = ({"max_update_norm": 1.0, "action": action} for action in ("clip", "reject"))


def _context(robustness: dict[str, Any], name: str = "fedsimclr", **changes: Any) -> Context:
    return Context(spec=method_spec(name, robustness=robustness, **changes), round_number=1)


def _moved(broadcast: Tensors, norm: float) -> Tensors:
    """Return the weights, all moved by the same amount, so that the whole change has this norm. Add 1 to counters."""
    floats = [name for name, tensor in broadcast.items() if tensor.is_floating_point()]
    step = norm / math.sqrt(sum(broadcast[name].numel() for name in floats))
    return {name: tensor + step if name in floats else tensor + 1 for name, tensor in broadcast.items()}


def _aggregated(ctx: Context, **norms: float) -> tuple[ServerResult, Tensors]:
    method = METHODS[ctx.spec.method.name]
    first = start_run(method, ctx)
    updates = [
        Update(name, 10, lambda norm=norm: _moved(first.broadcast, norm))  # type: ignore[misc]
        for name, norm in norms.items()
    ]
    return run_aggregation(method, first.state, updates, ctx), first.broadcast


def _distance(result: ServerResult, broadcast: Tensors) -> float:
    floats = [name for name, tensor in broadcast.items() if tensor.is_floating_point()]
    return math.sqrt(sum(float((result.broadcast[n].double() - broadcast[n].double()).square().sum()) for n in floats))


def test_norm_bounding_is_off_by_default() -> None:
    result, broadcast = _aggregated(_context({}), a=1e6)
    assert _distance(result, broadcast) == pytest.approx(1e6, rel=1e-3)
    assert result.norms.by_client == pytest.approx({"a": 1e6}, rel=1e-3)  # measured nevertheless
    assert not result.norms.clipped
    assert not result.norms.rejected


def test_updates_within_the_bound_do_not_change_by_a_bit() -> None:
    bounded, _ = _aggregated(_context(CLIP), a=0.5, b=0.9)
    free, _ = _aggregated(_context({}), a=0.5, b=0.9)
    assert all(torch.equal(bounded.broadcast[name], free.broadcast[name]) for name in free.broadcast)
    assert bounded.norms.by_client == pytest.approx({"a": 0.5, "b": 0.9}, rel=1e-3)
    assert bounded.norms.clipped == bounded.norms.rejected == {}


def test_a_clipped_update_keeps_its_direction_and_has_the_norm_of_the_bound() -> None:
    result, broadcast = _aggregated(_context(CLIP), a=1000.0)
    assert _distance(result, broadcast) == pytest.approx(1.0, rel=1e-3)
    assert result.norms.clipped.keys() == {"a"}
    assert "its update_norm 1000 is beyond robustness.max_update_norm 1" in result.norms.clipped["a"]
    straight, _ = _aggregated(_context({}), a=1.0)
    for name, tensor in straight.broadcast.items():
        torch.testing.assert_close(result.broadcast[name], tensor, rtol=1e-4, atol=1e-6)


def test_rejected_updates_do_not_change_the_result() -> None:
    result, _ = _aggregated(_context(REJECT), a=0.5, b=1000.0, c=0.25)
    without, _ = _aggregated(_context({}), a=0.5, c=0.25)
    assert all(torch.equal(result.broadcast[name], without.broadcast[name]) for name in without.broadcast)
    assert result.norms.rejected.keys() == {"b"}
    assert result.norms.by_client["b"] == pytest.approx(1000.0, rel=1e-3)


def test_an_update_that_is_not_finite_is_rejected_even_if_the_action_is_clip() -> None:
    ctx = _context(CLIP)
    method = METHODS["fedsimclr"]
    first = start_run(method, ctx)
    wild = {name: torch.full_like(tensor, float("inf")) if tensor.is_floating_point() else tensor
            for name, tensor in first.broadcast.items()}  # fmt: skip
    updates = [Update("a", 1, lambda: first.broadcast), Update("b", 1, lambda: wild)]
    result = run_aggregation(method, first.state, updates, ctx)
    assert result.norms.rejected.keys() == {"b"}
    assert all(math.isfinite(norm) for norm in result.norms.by_client.values())
    assert all(torch.isfinite(tensor).all() for tensor in result.broadcast.values() if tensor.is_floating_point())


def test_a_round_with_too_few_accepted_updates_fails_with_the_reasons() -> None:
    reasons = r"a: its update_norm 5 is beyond robustness.max_update_norm 1; b: its update_norm 6 is beyond"
    with pytest.raises(TooFewUpdates, match=rf"2 of 2 updates were rejected, and 1 is needed\. {reasons}"):
        _aggregated(_context(REJECT), a=5.0, b=6.0)
    with pytest.raises(TooFewUpdates, match=r"1 of 2 updates .* 2 are needed"):
        _aggregated(_context(REJECT, cohort={"min_updates": 2}), a=0.5, b=6.0)


def test_a_method_without_weights_to_compare_is_refused_at_its_start() -> None:
    ctx = _context(CLIP, "flesd")
    with pytest.raises(SpecError, match="flesd sends no weights that could be compared with the broadcast"):
        start_run(METHODS["flesd"], ctx)
