"""Alerts of collapse and drift: a measurement of a client crosses a threshold when a round closes."""

from pathlib import Path
from typing import Any

import pytest

from fedssl.evaluation.monitoring import CollapseAlert
from fedssl.protocol.states import Outcome, RunState
from fedssl.protocol.views import EventView
from fedssl.protocol.work import Submit
from fedssl.simulation import simulate
from support.coordinator import Coordinator
from support.distillation_scenario import DistillationScenario, distillation_spec
from support.federation import tensors_for, upload
from support.methods import method_spec, shards
from support.scenario import Scenario
from support.tables import Tables

HIGH = {"min_effective_rank": 1e6, "first_round": 1}  # no client reaches it


def _scenario(coordinator: Coordinator, tables: Tables, folder: Path, **watch: Any) -> Scenario:
    return Scenario(coordinator, tables, folder, num_rounds=3, watch={**HIGH, **watch})


def _deliver(scenario: Scenario, folder: Path, **metrics: float) -> None:
    """Let every client submit these metrics, and close the round."""
    for name in scenario.workers:
        item = scenario.claim(name)
        digest = upload(scenario.workers[name], item, tensors_for(item.plan.update), folder)
        found = {"loss": 0.5, "effective_rank": 3.0, **metrics}
        scenario.workers[name].submit(
            Submit(assignment_id=item.assignment_id, update=digest, num_examples=10, metrics=found)
        )
    scenario.advance()


def _alerts(coordinator: Coordinator, scenario: Scenario | DistillationScenario) -> list[EventView]:
    return [event for event in coordinator.client.event_log(scenario.id) if event.kind == "run.alarm"]


def test_an_alert_is_an_event_and_the_run_continues(coordinator: Coordinator, tables: Tables, tmp_path: Path) -> None:
    scenario = _scenario(coordinator, tables, tmp_path, max_divergence=0.25)
    _deliver(scenario, tmp_path, divergence=0.5)
    assert (scenario.run.state, scenario.run.rounds_closed, scenario.round.number) == (RunState.RUNNING, 1, 2)
    [event] = _alerts(coordinator, scenario)
    assert event.round_number == 1
    assert event.message == (
        "a: effective_rank 3 is below 1e+06 (collapse); a: divergence 0.5 is above 0.25 (drift); "
        "b: effective_rank 3 is below 1e+06 (collapse); and 1 more"
    )
    assert event.data["alarms"][1] == {"client_id": "a", "name": "divergence", "value": 0.5, "threshold": 0.25}
    assert len(event.data["alarms"]) == 4


def test_metrics_within_the_thresholds_give_no_alert(coordinator: Coordinator, tables: Tables, tmp_path: Path) -> None:
    scenario = _scenario(coordinator, tables, tmp_path, min_effective_rank=2.0, first_round=1)
    _deliver(scenario, tmp_path)
    _deliver(scenario, tmp_path, feature_std=0.5, embedding_std=0.5)
    assert _alerts(coordinator, scenario) == []


def test_early_rounds_give_no_alert(coordinator: Coordinator, tables: Tables, tmp_path: Path) -> None:
    scenario = _scenario(coordinator, tables, tmp_path, first_round=2)
    _deliver(scenario, tmp_path)
    _deliver(scenario, tmp_path)
    assert [event.round_number for event in _alerts(coordinator, scenario)] == [2]


def test_alerts_pause_a_run_once_per_round_until_an_operator_resumes_it(
    coordinator: Coordinator, tables: Tables, tmp_path: Path
) -> None:
    scenario = _scenario(coordinator, tables, tmp_path, action="pause")
    _deliver(scenario, tmp_path)
    run = scenario.run
    assert (run.state, run.rounds_closed) == (RunState.PAUSED, 1)
    assert run.reason == (
        "round 1: a: effective_rank 3 is below 1e+06 (collapse); b: effective_rank 3 is below 1e+06 (collapse); "
        "resume the run to continue anyway"
    )
    scenario.advance()
    assert len(scenario.rounds) == 1
    resumed = coordinator.client.resume(scenario.id)
    assert (resumed.state, resumed.reason) == (RunState.RUNNING, None)
    scenario.advance()
    assert (scenario.run.state, scenario.round.number) == (RunState.RUNNING, 2)
    _deliver(scenario, tmp_path)
    assert scenario.run.state == RunState.PAUSED
    coordinator.client.resume(scenario.id)
    scenario.advance()
    _deliver(scenario, tmp_path)  # the last round: there is nothing left to pause
    assert (scenario.run.outcome, scenario.run.rounds_closed) == (Outcome.COMPLETED, 3)
    kinds = [event.kind for event in coordinator.client.event_log(scenario.id)]
    assert (kinds.count("run.alarm"), kinds.count("run.paused")) == (3, 2)


@pytest.mark.changes_states
def test_a_run_that_is_already_paused_gets_the_alert_as_its_reason(
    coordinator: Coordinator, tables: Tables, tmp_path: Path
) -> None:
    """The run was paused while the round was being aggregated."""
    from fedssl_coordinator.aggregator import rounds

    scenario = _scenario(coordinator, tables, tmp_path, action="pause")
    publish = rounds.publish_next

    def pause_first(session: Any, run: Any, *arguments: Any, **values: Any) -> None:
        run.state = RunState.PAUSED
        session.flush()
        publish(session, run, *arguments, **values)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rounds, "publish_next", pause_first)
        _deliver(scenario, tmp_path)
    assert scenario.run.state == RunState.PAUSED
    assert "effective_rank 3 is below" in str(scenario.run.reason)


def test_only_clients_with_an_accepted_update_give_alerts(
    coordinator: Coordinator, tables: Tables, tmp_path: Path
) -> None:
    """In a partial round, metrics that a client sent before it expired do not count."""
    scenario = Scenario(coordinator, tables, tmp_path, num_rounds=2, watch=HIGH, cohort={"min_updates": 1})
    item = scenario.claim("a")
    digest = upload(scenario.workers["a"], item, tensors_for(item.plan.update), tmp_path)
    numbers = {"loss": 0.5, "effective_rank": 3.0}
    scenario.workers["a"].submit(
        Submit(assignment_id=item.assignment_id, update=digest, num_examples=10, metrics=numbers)
    )
    tables.execute(
        "INSERT INTO metrics (run_id, round_number, client_id, name, value) VALUES (%s, 1, 'b', 'effective_rank', 1)",
        scenario.id,
    )
    tables.execute("UPDATE rounds SET deadline = now() - interval '1 second'")
    scenario.advance()
    [event] = _alerts(coordinator, scenario)
    assert [alarm["client_id"] for alarm in event.data["alarms"]] == ["a"]


def test_a_client_whose_update_is_left_out_does_not_pause_the_run(
    coordinator: Coordinator, tables: Tables, tmp_path: Path
) -> None:
    watch = {"min_effective_rank": 2.0, "first_round": 1, "action": "pause"}
    scenario = Scenario(coordinator, tables, tmp_path, "ab", num_rounds=2, watch=watch)
    for name, value, rank in (("a", 0.0, 3.0), ("b", 3e38, 1.0)):
        item = scenario.claim(name)
        digest = upload(scenario.workers[name], item, tensors_for(item.plan.update, value), tmp_path)
        numbers = {"loss": 0.5, "effective_rank": rank}
        scenario.workers[name].submit(
            Submit(assignment_id=item.assignment_id, update=digest, num_examples=10, metrics=numbers)
        )
    scenario.advance()
    assert (scenario.rounds[0].verdict, scenario.run.state) == ("partial", RunState.RUNNING)
    assert _alerts(coordinator, scenario) == []


@pytest.mark.full(but=1)
@pytest.mark.parametrize("distils", [False, True])
def test_real_clients_give_the_same_alerts_as_a_simulation(
    coordinator: Coordinator, tables: Tables, tmp_path: Path, *, distils: bool
) -> None:
    """This holds for plain and for distilled rounds."""
    watch = {**HIGH, "num_images": 32}
    spec = distillation_spec(watch=watch) if distils else method_spec("fedsimclr", num_rounds=1, watch=watch)
    scenario = DistillationScenario(coordinator, tables, tmp_path, spec)
    if distils:
        scenario.distil()
    [event] = _alerts(coordinator, scenario)
    simulated = simulate(spec, shards(spec)).history[0].alarms
    assert [str(CollapseAlert(**alarm)) for alarm in event.data["alarms"]] == simulated
    assert len([alarm for alarm in simulated if "effective_rank" in alarm]) == 3
