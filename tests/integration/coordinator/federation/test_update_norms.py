"""Updates beyond `robustness.max_update_norm`, and unusual ones, in the record of the run."""

from pathlib import Path
from typing import Any

import pytest

from support.coordinator import Coordinator
from support.scenario import Scenario
from support.tables import Tables


def _scenario(coordinator: Coordinator, tables: Tables, folder: Path, names: str, **robustness: Any) -> Scenario:
    cohort = {"min_updates": 1}
    return Scenario(coordinator, tables, folder, names, cohort=cohort, robustness=robustness, num_rounds=2)


def test_a_rejected_update_is_recorded_in_the_verdict_events_and_metrics(
    coordinator: Coordinator, tables: Tables, tmp_path: Path
) -> None:
    scenario = _scenario(coordinator, tables, tmp_path, "abc", max_update_norm=100.0, action="reject")
    scenario.work("a", "b", value=0.0)
    scenario.work("c", value=1e6)
    scenario.advance()
    first = scenario.rounds[0]
    assert first.verdict == "partial"
    assert first.reason == "2 of 3 updates; left out: c"
    (event,) = scenario.events("update.rejected")
    assert (event.client_id, event.round_number) == ("c", 1)
    assert event.data["norm"] > 1e6
    norms = {m.client_id: m.value for m in coordinator.client.metrics(scenario.id, "update_norm")}
    assert norms.keys() == {"a", "b", "c"}
    assert norms["a"] == norms["b"] < 100 < norms["c"]
    losses = {m.client_id for m in coordinator.client.metrics(scenario.id, "loss")}
    assert {"a", "b", "c"} <= losses  # metrics that the clients sent are kept
    assert scenario.run.model is not None
    assert all(
        float(t.abs().max()) < 1 for n, t in coordinator.tensors(scenario.run.model).items() if t.is_floating_point()
    )


def test_a_clipped_update_counts_and_is_recorded(coordinator: Coordinator, tables: Tables, tmp_path: Path) -> None:
    scenario = _scenario(coordinator, tables, tmp_path, "ab", max_update_norm=100.0)
    scenario.work("a", value=0.0)
    scenario.work("b", value=1e6)
    scenario.advance()
    assert scenario.rounds[0].verdict == "aggregated"
    assert scenario.rounds[0].reason == "2 of 2 updates; clipped: b"
    assert [event.client_id for event in scenario.events("update.clipped")] == ["b"]


def test_a_round_without_usable_updates_fails_the_run_with_the_reason(
    coordinator: Coordinator, tables: Tables, tmp_path: Path
) -> None:
    scenario = _scenario(coordinator, tables, tmp_path, "ab", max_update_norm=1e-3, action="reject")
    scenario.work("a", "b", value=5.0)
    scenario.advance()
    assert scenario.run.outcome == "failed"
    reason = "round 1: 2 of 2 updates were rejected, and 1 is needed. a: its update_norm 110.704 is beyond robustness."
    assert str(scenario.run.reason).startswith(reason)


@pytest.mark.parametrize("norm", [0, -1, "x", float("inf")])
def test_an_invalid_max_update_norm_is_refused(shared_coordinator: Coordinator, norm: object) -> None:
    spec = {"robustness": {"max_update_norm": norm if norm != float("inf") else "1e999"}}
    with shared_coordinator.http() as http:
        answer = http.post("/v1/runs", json={"spec": spec})
    assert answer.status_code == 422
    assert "robustness.max_update_norm" in answer.json()["detail"]


def test_an_update_too_large_to_train_from_is_left_out_even_without_a_bound(
    coordinator: Coordinator, tables: Tables, tmp_path: Path
) -> None:
    """Weights of 3e38 are finite, but no client can train from their mean: such an update once ended a run."""
    scenario = _scenario(coordinator, tables, tmp_path, "abcd")
    scenario.work("a", "b", "c", value=0.0)
    scenario.work("d", value=3e38)
    scenario.advance()
    first = scenario.rounds[0]
    assert (first.verdict, first.reason) == ("partial", "3 of 4 updates; left out: d")
    (event,) = scenario.events("update.rejected")
    assert event.client_id == "d"
    assert "the update was left out: its update_norm is " in event.message
    assert {a.client_id: a.state for a in first.assignments} == {**dict.fromkeys("abc", "accepted"), "d": "rejected"}
    scenario.work("a", "b", "c", "d", value=0.1)  # the run continues with all four
    scenario.advance()
    assert scenario.run.outcome == "completed"
    assert scenario.rounds[1].verdict == "aggregated"


def test_the_client_of_a_rejected_update_continues_after_its_next_accepted_one(
    coordinator: Coordinator, tables: Tables, tmp_path: Path
) -> None:
    cohort = {"min_updates": 1}
    robustness = {"max_update_norm": 1e5, "action": "reject"}
    scenario = Scenario(coordinator, tables, tmp_path, "ab", cohort=cohort, robustness=robustness, num_rounds=4)
    known = []
    for value in (0.0, 1e6, 0.0):
        scenario.work("a", value=0.0)
        scenario.work("b", value=value)
        scenario.advance()
    for name in "ab":
        item = scenario.claim(name)
        assert item.last_accepted is not None
        known.append(item.last_accepted.round_number)
    assert known == [3, 3]
    second = {a.client_id: a.state for a in scenario.rounds[1].assignments}
    assert second == {"a": "accepted", "b": "rejected"}


def test_after_a_rejection_a_client_continues_from_its_last_accepted_update(
    coordinator: Coordinator, tables: Tables, tmp_path: Path
) -> None:
    scenario = _scenario(coordinator, tables, tmp_path, "ab", max_update_norm=1e5, action="reject")
    scenario.work("a", value=0.0)
    scenario.work("b", value=1e6)
    scenario.advance()
    assert scenario.claim("b").last_accepted is None  # its only update was left out
    accepted = scenario.claim("a").last_accepted
    assert accepted is not None
    assert accepted.round_number == 1


@pytest.mark.parametrize("without_quorum", ["fail", "skip"])
def test_too_few_usable_updates_fail_the_run_or_skip_the_round_as_the_spec_asks(
    coordinator: Coordinator, tables: Tables, tmp_path: Path, without_quorum: str
) -> None:
    cohort = {"min_updates": 3, "without_quorum": without_quorum}
    scenario = Scenario(coordinator, tables, tmp_path, "abc", cohort=cohort, num_rounds=2)
    scenario.work("a", "b", value=0.0)
    scenario.work("c", value=3e38)
    scenario.advance()
    first = scenario.rounds[0]
    assert first.verdict == ("skipped" if without_quorum == "skip" else "failed")
    reason = str(first.reason if without_quorum == "skip" else scenario.run.reason)
    assert "1 of 3 updates was rejected, and 3 are needed. c: its update_norm is " in reason
    assert "learning_rate" not in reason
    assert "a:" not in reason
    assert "b:" not in reason
    assert [event.client_id for event in scenario.events("update.rejected")] == ["c"]
    if without_quorum == "skip":
        scenario.work("a", "b", "c", value=0.1)
        scenario.advance()
        assert scenario.rounds[1].verdict == "aggregated"


def test_an_unusual_update_is_an_event_and_every_update_is_measured(
    coordinator: Coordinator, tables: Tables, tmp_path: Path
) -> None:
    scenario = _scenario(coordinator, tables, tmp_path, "abcd")
    for name, value in {"a": 0.9, "b": 1.0, "c": 1.1, "d": 500.0}.items():
        scenario.work(name, value=value)
    scenario.advance()
    assert scenario.rounds[0].verdict == "aggregated"
    (event,) = scenario.events("update.unusual")
    assert (event.client_id, event.round_number) == ("d", 1)
    assert event.message.startswith("d: update_norm ")
    assert " times the median of the others (" in event.message
    assert event.data["num_examples"] == 10
    for name in ("update_norm", "update_cosine", "update_weight_share"):
        found = {m.client_id: m.value for m in coordinator.client.metrics(scenario.id, name)}
        assert found.keys() == set("abcd"), name
    assert found == dict.fromkeys("abcd", 0.25)


def test_updates_that_are_left_out_do_not_hide_an_unusual_one(
    coordinator: Coordinator, tables: Tables, tmp_path: Path
) -> None:
    """Three clients with weights of 3e38 would otherwise make the 500 of a fourth look small."""
    scenario = _scenario(coordinator, tables, tmp_path, "abcdefg")
    scenario.work("a", "b", "c", value=1.0)
    scenario.work("d", value=500.0)
    scenario.work("e", "f", "g", value=3e38)
    scenario.advance()
    assert scenario.rounds[0].reason == "4 of 7 updates; left out: e, f, g"
    assert [event.client_id for event in scenario.events("update.unusual")] == ["d"]


def test_an_unusually_large_number_of_images_is_an_event(
    coordinator: Coordinator, tables: Tables, tmp_path: Path
) -> None:
    scenario = _scenario(coordinator, tables, tmp_path, "ab")
    scenario.work("a", "b", value=0.0)
    scenario.advance()
    scenario.work("a", value=0.0)
    scenario.claim("b")
    scenario.deliver("b", 0.0, num_examples=90)
    scenario.advance()
    (event,) = scenario.events("update.unusual")
    assert event.message == "b: num_examples 90 is 9 times the median of its earlier rounds (10)"


def test_a_failed_round_names_the_client_whose_update_was_unusual_before_it(
    coordinator: Coordinator, tables: Tables, tmp_path: Path
) -> None:
    """The honest clients cannot train from the weights that it left behind, and must not be blamed."""
    cohort = {"max_attempts": 1}
    scenario = Scenario(coordinator, tables, tmp_path, "abcd", cohort=cohort, num_rounds=3)
    scenario.work("a", "b", "c", value=1.0)
    scenario.work("d", value=1e15)
    scenario.advance()
    for name in "abcd":
        item = scenario.claim(name)
        scenario.workers[name].decline(item.assignment_id, "loss is not a finite number")
    scenario.advance()
    assert str(scenario.run.reason).endswith(". Before it, the update of d was unusual: see the events update.unusual")


@pytest.mark.parametrize("share", [0, 1.5, "x"])
def test_an_invalid_max_weight_share_is_refused(shared_coordinator: Coordinator, share: object) -> None:
    with shared_coordinator.http() as http:
        answer = http.post("/v1/runs", json={"spec": {"robustness": {"max_weight_share": share}}})
    assert answer.status_code == 422
    assert "robustness.max_weight_share" in answer.json()["detail"]


def test_a_value_out_of_range_in_fixed_point_excludes_only_its_clients_update(
    coordinator: Coordinator, tables: Tables, tmp_path: Path
) -> None:
    """One client could once end every round without a result, and was not named."""
    scenario = Scenario(coordinator, tables, tmp_path, "abc", aggregation={"arithmetic": "fixed"}, num_rounds=2)
    scenario.work("a", "b", value=0.0)
    scenario.work("c", value=1e9)
    scenario.advance()
    first = scenario.rounds[0]
    assert (first.verdict, first.reason) == ("partial", "2 of 3 updates; left out: c")
    (event,) = scenario.events("update.rejected")
    assert event.client_id == "c"
    assert "c: the update was left out: encoder." in event.message
    assert [scenario.claim(name).last_accepted is None for name in "abc"] == [False, False, True]


def test_an_out_of_range_round_is_skipped_and_names_the_tensor_and_the_client(
    coordinator: Coordinator, tables: Tables, tmp_path: Path
) -> None:
    scenario = Scenario(
        coordinator,
        tables,
        tmp_path,
        "abc",
        cohort={"min_updates": 3},
        aggregation={"arithmetic": "fixed"},
        num_rounds=3,
    )
    scenario.work("a", "b", "c", value=0.0)
    scenario.advance()
    first = scenario.run.model
    scenario.work("a", "b", value=0.0)
    scenario.work("c", value=1e9)
    scenario.advance()
    second = scenario.rounds[1]
    assert second.verdict == "skipped"
    assert str(second.reason).startswith("out of range: encoder.")
    assert str(second.reason).endswith(". Without c, fewer than 3 updates are left")
    assert [event.client_id for event in scenario.events("update.rejected")] == ["c"]
    assert scenario.run.model == first
    assert {m.client_id for m in coordinator.client.metrics(scenario.id, "update_norm")} == set("abc")
    assert [scenario.claim(name).last_accepted.round_number for name in "abc"] == [1, 1, 1]  # type: ignore[union-attr]
    for name in "abc":
        scenario.deliver(name, 0.1)
    scenario.advance()
    assert scenario.rounds[2].verdict == "aggregated"
    assert scenario.run.outcome == "completed"
