"""Alerts of collapse and drift: a measurement of a client crosses a threshold when a round closes."""

from pathlib import Path
from typing import Any

import pytest

from fedssl.evaluation.monitoring import CollapseAlert
from fedssl.protocol.states import Outcome, RunState
from fedssl.protocol.views import EventView
from fedssl.protocol.work import Submit
from fedssl.simulation import simulate
from support.cast import Cast
from support.coordinator import Coordinator
from support.distilling import DistillingCast, distilling_spec
from support.federation import tensors_for, upload
from support.methods import method_spec, shards
from support.tables import Tables

HIGH = {"min_effective_rank": 1e6, "first_round": 1}  # no client reaches it


def _cast(coordinator: Coordinator, tables: Tables, folder: Path, **watch: Any) -> Cast:
    return Cast(coordinator, tables, folder, num_rounds=3, watch={**HIGH, **watch})


def _deliver(cast: Cast, folder: Path, **metrics: float) -> None:
    """Let every client submit these metrics, and close the round."""
    for name in cast.workers:
        item = cast.claim(name)
        digest = upload(cast.workers[name], item, tensors_for(item.plan.update), folder)
        found = {"loss": 0.5, "effective_rank": 3.0, **metrics}
        cast.workers[name].submit(
            Submit(assignment_id=item.assignment_id, update=digest, num_examples=10, metrics=found)
        )
    cast.advance()


def _alerts(coordinator: Coordinator, cast: Cast | DistillingCast) -> list[EventView]:
    return [event for event in coordinator.client.event_log(cast.id) if event.kind == "run.alarm"]


def test_an_alert_is_an_event_and_the_run_continues(coordinator: Coordinator, tables: Tables, tmp_path: Path) -> None:
    cast = _cast(coordinator, tables, tmp_path, max_divergence=0.25)
    _deliver(cast, tmp_path, divergence=0.5)
    assert (cast.run.state, cast.run.rounds_closed, cast.round.number) == (RunState.RUNNING, 1, 2)
    [event] = _alerts(coordinator, cast)
    assert event.round_number == 1
    assert event.message == (
        "a: effective_rank 3 is below 1e+06 (collapse); a: divergence 0.5 is above 0.25 (drift); "
        "b: effective_rank 3 is below 1e+06 (collapse); and 1 more"
    )
    assert event.data["alarms"][1] == {"client_id": "a", "name": "divergence", "value": 0.5, "threshold": 0.25}
    assert len(event.data["alarms"]) == 4


def test_metrics_within_the_thresholds_give_no_alert(coordinator: Coordinator, tables: Tables, tmp_path: Path) -> None:
    cast = _cast(coordinator, tables, tmp_path, min_effective_rank=2.0, first_round=1)
    _deliver(cast, tmp_path)
    _deliver(cast, tmp_path, feature_std=0.5, embedding_std=0.5)
    assert _alerts(coordinator, cast) == []


def test_early_rounds_give_no_alert(coordinator: Coordinator, tables: Tables, tmp_path: Path) -> None:
    cast = _cast(coordinator, tables, tmp_path, first_round=2)
    _deliver(cast, tmp_path)
    _deliver(cast, tmp_path)
    assert [event.round_number for event in _alerts(coordinator, cast)] == [2]


def test_alerts_pause_a_run_once_per_round_until_an_operator_resumes_it(
    coordinator: Coordinator, tables: Tables, tmp_path: Path
) -> None:
    cast = _cast(coordinator, tables, tmp_path, action="pause")
    _deliver(cast, tmp_path)
    run = cast.run
    assert (run.state, run.rounds_closed) == (RunState.PAUSED, 1)
    assert run.reason == (
        "round 1: a: effective_rank 3 is below 1e+06 (collapse); b: effective_rank 3 is below 1e+06 (collapse); "
        "resume the run to continue anyway"
    )
    cast.advance()
    assert len(cast.rounds) == 1
    resumed = coordinator.client.resume(cast.id)
    assert (resumed.state, resumed.reason) == (RunState.RUNNING, None)
    cast.advance()
    assert (cast.run.state, cast.round.number) == (RunState.RUNNING, 2)
    _deliver(cast, tmp_path)
    assert cast.run.state == RunState.PAUSED
    coordinator.client.resume(cast.id)
    cast.advance()
    _deliver(cast, tmp_path)  # the last round: there is nothing left to pause
    assert (cast.run.outcome, cast.run.rounds_closed) == (Outcome.COMPLETED, 3)
    kinds = [event.kind for event in coordinator.client.event_log(cast.id)]
    assert (kinds.count("run.alarm"), kinds.count("run.paused")) == (3, 2)


@pytest.mark.changes_states
def test_a_run_that_is_already_paused_gets_the_alert_as_its_reason(
    coordinator: Coordinator, tables: Tables, tmp_path: Path
) -> None:
    """The run was paused while the round was being aggregated."""
    from fedssl_coordinator.aggregator import rounds

    cast = _cast(coordinator, tables, tmp_path, action="pause")
    publish = rounds.publish_next

    def pause_first(session: Any, run: Any, *arguments: Any, **values: Any) -> None:
        run.state = RunState.PAUSED
        session.flush()
        publish(session, run, *arguments, **values)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rounds, "publish_next", pause_first)
        _deliver(cast, tmp_path)
    assert cast.run.state == RunState.PAUSED
    assert "effective_rank 3 is below" in str(cast.run.reason)


def test_only_clients_with_an_accepted_update_give_alerts(
    coordinator: Coordinator, tables: Tables, tmp_path: Path
) -> None:
    """In a partial round, metrics that a client sent before it expired do not count."""
    cast = Cast(coordinator, tables, tmp_path, num_rounds=2, watch=HIGH, cohort={"min_updates": 1})
    item = cast.claim("a")
    digest = upload(cast.workers["a"], item, tensors_for(item.plan.update), tmp_path)
    numbers = {"loss": 0.5, "effective_rank": 3.0}
    cast.workers["a"].submit(Submit(assignment_id=item.assignment_id, update=digest, num_examples=10, metrics=numbers))
    tables.execute(
        "INSERT INTO metrics (run_id, round_number, client_id, name, value) VALUES (%s, 1, 'b', 'effective_rank', 1)",
        cast.id,
    )
    tables.execute("UPDATE rounds SET deadline = now() - interval '1 second'")
    cast.advance()
    [event] = _alerts(coordinator, cast)
    assert [alarm["client_id"] for alarm in event.data["alarms"]] == ["a"]


def test_a_client_whose_update_is_left_out_does_not_pause_the_run(
    coordinator: Coordinator, tables: Tables, tmp_path: Path
) -> None:
    watch = {"min_effective_rank": 2.0, "first_round": 1, "action": "pause"}
    cast = Cast(coordinator, tables, tmp_path, "ab", num_rounds=2, watch=watch)
    for name, value, rank in (("a", 0.0, 3.0), ("b", 3e38, 1.0)):
        item = cast.claim(name)
        digest = upload(cast.workers[name], item, tensors_for(item.plan.update, value), tmp_path)
        numbers = {"loss": 0.5, "effective_rank": rank}
        cast.workers[name].submit(
            Submit(assignment_id=item.assignment_id, update=digest, num_examples=10, metrics=numbers)
        )
    cast.advance()
    assert (cast.rounds[0].verdict, cast.run.state) == ("partial", RunState.RUNNING)
    assert _alerts(coordinator, cast) == []


@pytest.mark.parametrize("distils", [False, True])
def test_real_clients_give_the_same_alerts_as_a_simulation(
    coordinator: Coordinator, tables: Tables, tmp_path: Path, *, distils: bool
) -> None:
    """This holds for plain and for distilled rounds."""
    watch = {**HIGH, "num_images": 32}
    spec = distilling_spec(watch=watch) if distils else method_spec("fedsimclr", num_rounds=1, watch=watch)
    cast = DistillingCast(coordinator, tables, tmp_path, spec)
    if distils:
        cast.distil()
    [event] = _alerts(coordinator, cast)
    simulated = simulate(spec, shards(spec)).history[0].alarms
    assert [str(CollapseAlert(**alarm)) for alarm in event.data["alarms"]] == simulated
    assert len([alarm for alarm in simulated if "effective_rank" in alarm]) == 3
