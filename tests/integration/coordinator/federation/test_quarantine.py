"""A computation that repeatedly ends its process is given up with its cause, and is retried on request."""

from collections.abc import Callable
from pathlib import Path

import pytest

from fedssl.protocol.evaluation import JudgingConfig
from fedssl.protocol.states import JobState, Outcome, RunState
from support.coordinator import Coordinator
from support.distillation_scenario import DistillationScenario
from support.evaluated_runs import register_digits
from support.scenario import Scenario
from support.tables import Tables


class Killed(BaseException):
    """Stands for the end of the process: no handler gets to run."""


def _die(*_: object, **__: object) -> None:
    raise Killed


def _kill(times: int, attempt: Callable[[], None], pause_over: Callable[[], object]) -> None:
    for _ in range(times):
        with pytest.raises(Killed):
            attempt()
        pause_over()


CAUSE = "was given up: 5 tries in a row ended before they could record an error, so their process was killed or"


def test_an_aggregation_that_kills_its_process_pauses_the_run_until_it_is_resumed(
    coordinator: Coordinator, tables: Tables, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scenario = Scenario(coordinator, tables, tmp_path, num_rounds=1)
    scenario.work("a", "b")

    def pause_over() -> None:
        tables.execute("UPDATE runs SET retry_at = now() - interval '1 second' WHERE retry_at IS NOT NULL")

    with monkeypatch.context() as patch:
        patch.setattr("fedssl_coordinator.aggregator.rounds.run_aggregation", _die)
        _kill(5, scenario.advance, pause_over)
        assert scenario.run.state == RunState.RUNNING
        assert scenario.needs_attention()
        scenario.advance()
        assert scenario.run.state == RunState.PAUSED
        assert (scenario.run.reason or "").startswith(f"the aggregation of round 1 {CAUSE} out of")
        assert not scenario.needs_attention()
        scenario.advance()
        [event] = scenario.events("run.paused")
        assert event.message == scenario.run.reason
        coordinator.client.resume(scenario.id)
        _kill(1, scenario.advance, pause_over)  # it is retried as often as before
    assert scenario.run.state == RunState.RUNNING
    scenario.advance()
    assert scenario.run.outcome == Outcome.COMPLETED


def test_recorded_errors_between_deaths_keep_a_run_from_being_given_up(
    coordinator: Coordinator, tables: Tables, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four deaths, four recorded errors and four more deaths are not five deaths in a row."""
    scenario = Scenario(coordinator, tables, tmp_path, num_rounds=1)
    scenario.work("a", "b")

    def fail(*_: object, **__: object) -> None:
        raise OSError("the store does not answer")

    def pause_over() -> None:
        tables.execute("UPDATE runs SET retry_at = now() - interval '1 second' WHERE retry_at IS NOT NULL")

    for cause in (_die, fail, _die, fail):
        for _ in range(4):
            with monkeypatch.context() as patch:
                patch.setattr("fedssl_coordinator.aggregator.rounds.run_aggregation", cause)
                if cause is _die:
                    _kill(1, scenario.advance, pause_over)
                else:
                    scenario.advance()
                    pause_over()
    assert scenario.run.state == RunState.RUNNING
    scenario.advance()
    assert scenario.run.outcome == Outcome.COMPLETED


def test_a_preparation_that_kills_its_process_pauses_the_run(
    coordinator: Coordinator, tables: Tables, monkeypatch: pytest.MonkeyPatch
) -> None:
    from support.federation import tiny_spec

    coordinator.worker("a")
    run = coordinator.client.create_run(tiny_spec()).id
    monkeypatch.setattr("fedssl_coordinator.aggregator.rounds.start_run", _die)

    def pause_over() -> None:
        tables.execute("UPDATE runs SET retry_at = now() - interval '1 second' WHERE retry_at IS NOT NULL")

    _kill(5, lambda: coordinator.advance(run), pause_over)
    coordinator.advance(run)
    assert (coordinator.client.run(run).reason or "").startswith(f"the preparation of the run {CAUSE} out of")


def test_a_distillation_that_kills_its_process_pauses_its_run(
    coordinator: Coordinator, tables: Tables, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fedssl_coordinator.core.db import transaction
    from fedssl_coordinator.federation.distillation import repository

    scenario = DistillationScenario(coordinator, tables, tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr("fedssl_coordinator.aggregator.rounds.run_aggregation", _die)
        _kill(5, scenario.distil, scenario.end_pause)
        scenario.distil()
        assert scenario.run.state == RunState.PAUSED
        assert (scenario.run.reason or "").startswith(f"round 1: the distillation {CAUSE} out of")
        assert scenario.job.state == JobState.RUNNING
        scenario.tables.execute("UPDATE distillation_jobs SET sent_at = NULL")
        with transaction() as session:
            assert list(repository.select_due_notifications(session, 0)) == []
        scenario.distil()
        assert scenario.job.num_tries == 5
    coordinator.client.resume(scenario.id)
    scenario.distil()
    coordinator.advance(scenario.id)
    assert scenario.run.outcome == Outcome.COMPLETED


def test_an_evaluation_that_kills_its_process_fails_and_can_be_requested_again(
    coordinator: Coordinator, tables: Tables, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    register_digits(coordinator.client, tmp_path)
    scenario = DistillationScenario(coordinator, tables, tmp_path, train=False)
    config = JudgingConfig(dataset="digits", measures=("knn",))
    evaluation = coordinator.client.request_evaluation(scenario.id, config, 0).id

    def pause_over() -> None:
        tables.execute("UPDATE evaluations SET retry_at = now() - interval '1 second'")

    with monkeypatch.context() as patch:
        patch.setattr("fedssl_coordinator.aggregator.evaluations.detailed_evaluation", _die)
        _kill(5, lambda: coordinator.evaluate(evaluation), pause_over)
        coordinator.evaluate(evaluation)
    row = coordinator.client.evaluation(evaluation)
    assert row.state == JobState.FAILED
    assert (row.reason or "").startswith(f"the evaluation {CAUSE} out of")
    assert (row.reason or "").endswith("and request it again")
    assert coordinator.client.request_evaluation(scenario.id, config, 0).id == evaluation
    coordinator.evaluate(evaluation)
    assert coordinator.client.evaluation(evaluation).state == JobState.COMPLETED
