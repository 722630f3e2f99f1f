"""Updates beyond `robustness.max_update_norm`, as the run's record shows them."""

from pathlib import Path
from typing import Any

import pytest

from support.cast import Cast
from support.coordinator import Coordinator
from support.tables import Tables


def _cast(coordinator: Coordinator, tables: Tables, folder: Path, names: str, **robustness: Any) -> Cast:
    cohort = {"min_updates": 1}
    return Cast(coordinator, tables, folder, names, cohort=cohort, robustness=robustness, num_rounds=2)


def test_a_rejected_update_is_in_verdict_events_and_metrics(
    coordinator: Coordinator, tables: Tables, tmp_path: Path
) -> None:
    cast = _cast(coordinator, tables, tmp_path, "abc", max_update_norm=100.0, action="reject")
    cast.work("a", "b", value=0.0)
    cast.work("c", value=1e6)
    cast.advance()
    first = cast.rounds[0]
    assert first.verdict == "partial"
    assert first.reason == "2 of 3 updates; rejected by their norm: c"
    (event,) = cast.events("update.rejected")
    assert (event.client_id, event.round_number) == ("c", 1)
    assert event.data["norm"] > 1e6
    norms = {m.client_id: m.value for m in coordinator.client.metrics(cast.id, "update_norm")}
    assert norms.keys() == {"a", "b", "c"}
    assert norms["a"] == norms["b"] < 100 < norms["c"]
    losses = {m.client_id for m in coordinator.client.metrics(cast.id, "loss")}
    assert {"a", "b", "c"} <= losses  # what the clients sent themselves is kept
    assert cast.run.model is not None
    assert all(
        float(t.abs().max()) < 1 for n, t in coordinator.tensors(cast.run.model).items() if t.is_floating_point()
    )


def test_a_clipped_update_counts(coordinator: Coordinator, tables: Tables, tmp_path: Path) -> None:
    cast = _cast(coordinator, tables, tmp_path, "ab", max_update_norm=100.0)
    cast.work("a", value=0.0)
    cast.work("b", value=1e6)
    cast.advance()
    assert cast.rounds[0].verdict == "aggregated"
    assert cast.rounds[0].reason == "2 of 2 updates; clipped: b"
    assert [event.client_id for event in cast.events("update.clipped")] == ["b"]


def test_a_round_of_which_nothing_is_left_ends_the_run_and_says_why(
    coordinator: Coordinator, tables: Tables, tmp_path: Path
) -> None:
    cast = _cast(coordinator, tables, tmp_path, "ab", max_update_norm=1e-3, action="reject")
    cast.work("a", "b", value=5.0)
    cast.advance()
    assert cast.run.outcome == "failed"
    reason = "round 1: 2 of 2 updates were rejected, and 1 are needed. a: its update_norm 110.704 is beyond robustness."
    assert str(cast.run.reason).startswith(reason)


@pytest.mark.parametrize("norm", [0, -1, "x", float("inf")])
def test_a_bound_that_makes_no_sense(standing: Coordinator, norm: object) -> None:
    spec = {"robustness": {"max_update_norm": norm if norm != float("inf") else "1e999"}}
    with standing.http() as http:
        answer = http.post("/v1/runs", json={"spec": spec})
    assert answer.status_code == 422
    assert "robustness.max_update_norm" in answer.json()["detail"]
