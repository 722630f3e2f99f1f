"""Evaluations next to the run: they give the results of a simulation, even if processes are killed."""

import math
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import numpy as np
import pytest
import torch
from redis import Redis

from fedssl.client import Conflict, NotFound, Rejected
from fedssl.errors import DataError
from fedssl.evaluation.suite import RESULTS
from fedssl.protocol.states import JobState, Outcome, RoundState, RunState, Verdict
from fedssl.protocol.views import EvaluationView
from support.coordinator import Coordinator
from support.distillation_scenario import DistillationScenario, distillation_spec
from support.evaluated_runs import DATASET, FEW, evaluated_spec, register_digits, small_evaluation
from support.federation import tiny_spec
from support.methods import method_spec, simulation_of
from support.scenario import Scenario
from support.servers import Servers
from support.tables import Tables

COMPUTE = "fedssl_coordinator.aggregator.evaluations"


class Killed(BaseException):
    """Stands for the end of the process: no handler gets to run."""


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    """Make torch use one thread, as an evaluator does, so that the results are the same on every machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def scenario(coordinator: Coordinator, tables: Tables, tmp_path: Path) -> DistillationScenario:
    """Return a run whose first round is open, and whose weights are evaluated after every round."""
    register_digits(coordinator.client, tmp_path)
    return DistillationScenario(coordinator, tables, tmp_path, evaluated_spec(), train=False)


def _listed(scenario: DistillationScenario) -> list[EvaluationView]:
    return list(scenario.coordinator.client.evaluations(scenario.id))


def _evaluate(scenario: DistillationScenario) -> None:
    """Run every evaluation that is queued or running."""
    for row in _listed(scenario):
        if row.state in (JobState.QUEUED, JobState.RUNNING):
            scenario.coordinator.evaluate(row.id)


def _pause_over(scenario: DistillationScenario) -> None:
    scenario.tables.execute("UPDATE evaluations SET retry_at = now() - interval '1 second'")


def _assert_simulated(scenario: DistillationScenario) -> None:
    simulated = simulation_of(scenario.spec)
    assert {row.round_number: row.results for row in _listed(scenario)} == simulated.evaluations_by_round
    assert {row.chance for row in _listed(scenario)} == {simulated.chance}


def test_every_round_is_evaluated_like_its_simulation(scenario: DistillationScenario) -> None:
    """The rounds do not wait for evaluations: all are closed before the first evaluation begins."""
    for _ in range(scenario.spec.num_rounds):
        scenario.train()
    assert scenario.run.outcome == Outcome.COMPLETED
    assert [(row.round_number, row.state) for row in _listed(scenario)] == [(n, JobState.QUEUED) for n in (0, 1, 2)]
    _evaluate(scenario)
    _assert_simulated(scenario)
    [_, row, _] = _listed(scenario)
    assert row.state == JobState.COMPLETED
    assert row.progress is not None
    assert row.progress.results == row.results
    assert (row.dataset, row.model) == (DATASET, list(scenario.coordinator.client.rounds(scenario.id))[1].broadcast)
    assert row.started_at is not None
    assert row.finished_at is not None
    assert set(row.results or {}) == {name for names in RESULTS.values() for name in names}
    assert scenario.kinds("evaluation.").count("evaluation.completed") == 3
    [event] = [event for event in scenario.events("evaluation.completed") if event.round_number == 1]
    assert event.data["results"] == row.results
    assert event.data["evaluation"] == str(row.id)
    assert event.message.startswith("round 1, on digits: probe ")


def test_registered_images_go_through_the_runs_window_as_in_its_simulation(
    coordinator: Coordinator, tables: Tables, tmp_path: Path
) -> None:
    register_digits(coordinator.client, tmp_path)
    data = {"channels": 1, "image_size": 8, "window": {"percentiles": [5, 95]}}
    scenario = DistillationScenario(coordinator, tables, tmp_path, evaluated_spec(every=0, data=data))
    scenario.train()
    _evaluate(scenario)
    _assert_simulated(scenario)


def test_an_evaluation_is_refused_if_the_images_have_too_few_bits_for_the_runs_window(
    coordinator: Coordinator, tables: Tables, tmp_path: Path
) -> None:
    register_digits(coordinator.client, tmp_path)
    data = {"channels": 1, "image_size": 8, "window": {"values": [0, 4095]}}
    scenario = Scenario(coordinator, tables, tmp_path, "a", num_rounds=1, data=data)
    scenario.work("a")
    scenario.advance()
    with pytest.raises(Rejected, match=r"of digits have 8 bits per value: the window .* use `fedssl evaluate` where"):
        coordinator.client.request_evaluation(scenario.id, small_evaluation())
    assert list(coordinator.client.evaluations(scenario.id)) == []


def test_the_results_are_metrics_of_their_round(scenario: DistillationScenario) -> None:
    scenario.train()
    _evaluate(scenario)
    found = {
        (m.round_number, m.name): m.value
        for m in scenario.coordinator.client.metrics(scenario.id)
        if m.client_id is None
    }
    for row in _listed(scenario):
        assert row.results is not None
        for name, value in row.results.items():
            assert found[row.round_number, f"evaluation/{name}"] == value
    assert (1, "loss") in found
    probes = list(scenario.coordinator.client.metrics(scenario.id, "evaluation/probe"))
    assert [metric.round_number for metric in probes] == [0, 1]


def test_only_due_rounds_are_evaluated(coordinator: Coordinator, tables: Tables, tmp_path: Path) -> None:
    register_digits(coordinator.client, tmp_path)
    scenario = DistillationScenario(coordinator, tables, tmp_path, evaluated_spec(every=0))
    assert _listed(scenario) == []
    scenario.train()
    assert [row.round_number for row in _listed(scenario)] == [2]


def test_a_distilled_round_is_evaluated_too(coordinator: Coordinator, tables: Tables, tmp_path: Path) -> None:
    register_digits(coordinator.client, tmp_path)
    scenario = DistillationScenario(
        coordinator, tables, tmp_path, distillation_spec(evaluation={**FEW, "measures": ["knn"]})
    )
    scenario.distil()
    _evaluate(scenario)
    assert [row.round_number for row in _listed(scenario)] == [0, 1]
    _assert_simulated(scenario)


def test_a_skipped_last_round_is_evaluated_too(coordinator: Coordinator, tables: Tables, tmp_path: Path) -> None:
    """The weights of a skipped round are those of the round before."""
    register_digits(coordinator.client, tmp_path)
    cohort = {"without_quorum": "skip", "max_attempts": 1}
    scenario = Scenario(coordinator, tables, tmp_path, num_rounds=1, cohort=cohort, evaluation={**FEW, "every": 0})
    tables.execute("UPDATE rounds SET deadline = now() - interval '1 second'")
    scenario.advance()
    assert (scenario.round.verdict, scenario.run.outcome) == (Verdict.SKIPPED, Outcome.COMPLETED)
    [row] = coordinator.client.evaluations(scenario.id)
    assert (row.round_number, row.model) == (1, scenario.run.initial_model)


# On request


def test_any_closed_round_can_be_evaluated_on_request(scenario: DistillationScenario) -> None:
    client = scenario.coordinator.client
    scenario.train()
    _evaluate(scenario)
    with scenario.coordinator.http() as http:
        body = {"config": small_evaluation(measures=["geometry", "knn"]).model_dump(mode="json")}
        answers = [http.post(f"/v1/runs/{scenario.id}/evaluations", json=body) for _ in range(2)]
        body["config"]["measures"] = ["knn", "geometry"]  # the same measures in another order
        answers.append(http.post(f"/v1/runs/{scenario.id}/evaluations", json=body))
    assert [answer.status_code for answer in answers] == [201, 200, 200]
    assert len({answer.json()["id"] for answer in answers}) == 1
    newest = client.evaluation(UUID(answers[0].json()["id"]))
    assert (newest.round_number, newest.model) == (1, scenario.run.model)
    first = client.request_evaluation(scenario.id, small_evaluation(measures=["knn"]), 0)
    assert (first.round_number, first.model) == (0, scenario.run.initial_model)
    _evaluate(scenario)
    own = {
        row.round_number: row.results for row in _listed(scenario) if row.config.measures == small_evaluation().measures
    }
    for asked in (newest, first):
        found = client.evaluation(asked.id).results
        assert found is not None
        assert found == {name: (own[asked.round_number] or {})[name] for name in found}


def test_a_round_has_one_metric_per_name(scenario: DistillationScenario) -> None:
    """It comes from the run's own evaluation, even if that is not the first one, or else from the first request."""
    client = scenario.coordinator.client
    [own] = _listed(scenario)
    others = [
        client.request_evaluation(scenario.id, small_evaluation(measures=["knn"], max_test=n), 0) for n in (20, 30)
    ]
    for row in (others[0], own, others[1]):
        scenario.coordinator.evaluate(row.id)
    results = {row.id: row.results or {} for row in _listed(scenario)}
    [metric] = client.metrics(scenario.id, "evaluation/knn")
    assert metric.value == results[own.id]["knn"]
    scenario.tables.execute("DELETE FROM metrics")
    scenario.tables.execute("UPDATE runs SET spec = spec - 'evaluation'")
    rows = [client.request_evaluation(scenario.id, small_evaluation(measures=["knn"], max_test=n), 0) for n in (5, 7)]
    for row in rows:
        scenario.coordinator.evaluate(row.id)
    [metric] = client.metrics(scenario.id, "evaluation/knn")
    assert metric.value == (client.evaluation(rows[0].id).results or {})["knn"]


def test_an_evaluation_that_is_impossible_is_refused(scenario: DistillationScenario) -> None:
    client = scenario.coordinator.client
    with pytest.raises(Conflict, match=r"round 1 of run .* is not closed yet"):
        client.request_evaluation(scenario.id, small_evaluation(), 1)
    with pytest.raises(Rejected, match="no evaluation data set elsewhere is registered"):
        client.request_evaluation(scenario.id, small_evaluation(dataset="elsewhere"))
    with pytest.raises(NotFound, match="no run"):
        client.request_evaluation(uuid4(), small_evaluation())
    created = client.create_run(method_spec("fedsimclr"), start=False)
    with pytest.raises(Conflict, match="is not closed yet"):
        client.request_evaluation(created.id, small_evaluation())
    with scenario.coordinator.http() as http:
        body = {"config": {**small_evaluation().model_dump(mode="json"), "every": 3}}
        assert http.post(f"/v1/runs/{scenario.id}/evaluations", json=body).status_code == 422  # `every` is refused
    for call in (client.evaluation, client.cancel_evaluation):
        with pytest.raises(NotFound, match="no evaluation"):
            call(uuid4())
    assert len(_listed(scenario)) == 1


def test_a_run_that_sends_nothing_cannot_be_evaluated(scenario: DistillationScenario) -> None:
    """Its broadcast is the untrained network, and each client's own weights stay with the client."""
    client = scenario.coordinator.client
    method = {"name": "fedsimclr", "merge": {"name": "local"}, "reducer": {"name": "none"}}
    run = client.create_run(evaluated_spec(method=method))
    scenario.coordinator.advance(run.id)
    assert client.run(run.id).model is not None
    assert list(client.evaluations(run.id)) == []
    [event] = [event for event in client.event_log(run.id) if event.kind == "evaluation.impossible"]
    assert "sends nothing to the coordinator" in event.message
    with pytest.raises(Conflict, match="sends nothing to the coordinator"):
        client.request_evaluation(run.id, small_evaluation())


def test_only_operators_request_evaluations_and_viewers_see_them(scenario: DistillationScenario) -> None:
    [row] = _listed(scenario)
    with scenario.coordinator.http(scenario.coordinator.worker_token("client-0")) as http:
        for method, path in (
            ("POST", f"/v1/runs/{scenario.id}/evaluations"),
            ("GET", f"/v1/runs/{scenario.id}/evaluations"),
            ("GET", f"/v1/evaluations/{row.id}"),
            ("GET", f"/v1/evaluations/{row.id}/map"),
            ("POST", f"/v1/evaluations/{row.id}/cancel"),
        ):
            assert http.request(method, path).status_code == 403
    assert _listed(scenario) == [row]


def test_evaluations_are_listed_by_round_at_any_page_size(scenario: DistillationScenario) -> None:
    scenario.train()
    for number, size in ((1, 5), (0, 5), (1, 7), (0, 7)):
        scenario.coordinator.client.request_evaluation(scenario.id, small_evaluation(max_test=size), number)
    for limit in (1, 2, 4, 100):
        found: list[dict[str, Any]] = []
        query: dict[str, Any] = {"limit": limit}
        with scenario.coordinator.http() as http:
            while True:
                page = http.get(f"/v1/runs/{scenario.id}/evaluations", params=query).json()
                found += page["items"]
                if page["next_cursor"] is None:
                    break
                query["cursor"] = page["next_cursor"]
        assert [(row["round_number"], row["config"]["max_test"]) for row in found] == [
            (0, 100), (0, 5), (0, 7), (1, 100), (1, 5), (1, 7)
        ]  # fmt: skip


# Maps


def test_every_map_is_aligned_with_the_map_before(
    coordinator: Coordinator, tables: Tables, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Maps show the same images, do not change the other results, and are deleted with the run."""
    monkeypatch.setattr(f"{COMPUTE}.MAP_POINTS", 60)
    register_digits(coordinator.client, tmp_path)
    spec = evaluated_spec(evaluation={**FEW, "every": 1, "embedding_map": "pca"})
    scenario = DistillationScenario(coordinator, tables, tmp_path, spec, train=False)
    [row] = _listed(scenario)
    with pytest.raises(NotFound, match="is queued: the map is available when it is completed"):
        coordinator.client.evaluation_map(row.id)
    for _ in range(spec.num_rounds):
        scenario.train()
    _evaluate(scenario)
    _assert_simulated(scenario)
    maps = [coordinator.client.evaluation_map(row.id) for row in _listed(scenario)]
    assert [(found.round_number, found.method, found.dataset) for found in maps] == [
        (number, "pca", DATASET) for number in (0, 1, 2)
    ]
    for found, before in zip(maps[1:], maps, strict=False):
        points, other = np.array(found.points), np.array(before.points)
        assert (found.labels, points.shape) == (before.labels, (60, 2))
        assert abs(points.mean(axis=0)).max() < 1e-3
        assert (points**2).sum(axis=1).mean() == pytest.approx(1, abs=1e-3)
        closeness = points.T @ other  # after the best rotation it is symmetric without negative eigenvalues
        assert closeness == pytest.approx(closeness.T, abs=0.05)
        assert np.linalg.eigvalsh((closeness + closeness.T) / 2).min() > -0.05
    coordinator.client.delete_run(scenario.id)
    assert tables.one("SELECT count(*) FROM evaluations") == 0


def test_the_error_for_a_missing_map_gives_the_reason(scenario: DistillationScenario) -> None:
    client = scenario.coordinator.client
    _evaluate(scenario)
    [row] = _listed(scenario)
    with pytest.raises(NotFound, match="was requested without one"):
        client.evaluation_map(row.id)
    with pytest.raises(NotFound, match="no evaluation"):
        client.evaluation_map(uuid4())


# Interrupted


def _dies_at(monkeypatch: pytest.MonkeyPatch, write: int) -> None:
    """Make an evaluation raise Killed at the write of results with this number, before anything is written."""
    from fedssl_coordinator.aggregator.evaluations import _Progress

    write_results, calls = _Progress.on_results, [0]

    def on_results(self: Any, results: dict[str, float]) -> None:
        calls[0] += 1
        if calls[0] == write:
            raise Killed
        write_results(self, results)

    monkeypatch.setattr(_Progress, "on_results", on_results)


@pytest.mark.full(but=1)
@pytest.mark.parametrize(("write", "done"), [(2, ["probe"]), (1, []), (3, ["knn", "probe"])])
def test_a_killed_evaluation_resumes_at_the_next_measure(
    scenario: DistillationScenario, monkeypatch: pytest.MonkeyPatch, write: int, done: list[str]
) -> None:
    [row] = _listed(scenario)
    with monkeypatch.context() as patch:
        _dies_at(patch, write)
        with pytest.raises(Killed):
            _evaluate(scenario)
    [row] = _listed(scenario)
    assert row.state == JobState.RUNNING
    assert row.progress is not None
    assert sorted(row.progress.results) == done
    asked: list[tuple[str, ...]] = []
    from fedssl_coordinator.aggregator import evaluations

    detailed_evaluation = evaluations.detailed_evaluation

    def note(encoder: Any, labelled: Any, config: Any, *arguments: Any, **options: Any) -> Any:
        asked.append(config.measures)
        return detailed_evaluation(encoder, labelled, config, *arguments, **options)

    monkeypatch.setattr(evaluations, "detailed_evaluation", note)
    if not done:  # progress ends the pause that follows a death
        scenario.tables.execute("UPDATE evaluations SET retry_at = now() + interval '1 minute'")  # not 2 s
        _evaluate(scenario)
        assert _listed(scenario)[0].state == JobState.RUNNING
        _pause_over(scenario)
    _evaluate(scenario)
    assert asked == [tuple(measure for measure in ("probe", "knn", "geometry") if measure not in done)]
    scenario.coordinator.client.stop(scenario.id)
    simulated = simulation_of(scenario.spec).evaluations_by_round
    assert _listed(scenario)[0].results == simulated[0]
    assert [event.message[:31] for event in scenario.events("evaluation.stalled")] == [
        "try 1: the aggregator ended whi"
    ]
    [resumed] = scenario.events("evaluation.resumed")
    assert resumed.message == (f"continues after {', '.join(reversed(done))}" if done else "starts again")


def test_an_evaluation_that_died_after_its_last_measure_is_completed(
    scenario: DistillationScenario, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fedssl_coordinator.federation.evaluations import service

    with monkeypatch.context() as patch:

        def fatal(*_: object) -> None:
            raise Killed

        patch.setattr(service, "complete", fatal)
        with pytest.raises(Killed):
            _evaluate(scenario)
    monkeypatch.setattr(f"{COMPUTE}.detailed_evaluation", fatal)  # nothing is left to measure
    _pause_over(scenario)
    _evaluate(scenario)
    [row] = _listed(scenario)
    assert row.state == JobState.COMPLETED
    assert row.progress is not None
    assert row.results == row.progress.results


def test_a_process_that_is_asked_to_end_stops_evaluating_at_once(scenario: DistillationScenario) -> None:
    from fedssl_coordinator.core.celery_app import is_stopping

    is_stopping.set()
    _evaluate(scenario)
    is_stopping.clear()
    [row] = _listed(scenario)
    assert (row.state, row.num_tries) == (JobState.RUNNING, 0)
    _evaluate(scenario)
    assert _listed(scenario)[0].state == JobState.COMPLETED
    assert scenario.events("evaluation.stalled") == []


# Cancelled, failed


def test_a_cancelled_evaluation_can_be_requested_again(scenario: DistillationScenario) -> None:
    client, [row] = scenario.coordinator.client, _listed(scenario)
    cancelled = client.cancel_evaluation(row.id)
    assert (cancelled.state, cancelled.reason) == (JobState.CANCELLED, "cancelled by an operator")
    assert client.cancel_evaluation(row.id) == cancelled  # a repeated cancellation is not an error
    scenario.coordinator.evaluate(row.id)
    assert _listed(scenario) == [cancelled]
    assert scenario.run.state == RunState.RUNNING
    again = client.request_evaluation(scenario.id, row.config, 0)
    assert (again.id, again.state, again.reason, again.finished_at) == (row.id, JobState.QUEUED, None, None)
    _evaluate(scenario)
    assert _listed(scenario)[0].state == JobState.COMPLETED
    assert scenario.kinds("evaluation.") == [
        f"evaluation.{what}" for what in ("queued", "cancelled", "queued", "started", "completed")
    ]
    with pytest.raises(Conflict, match="is completed: only a queued or running one"):
        client.cancel_evaluation(row.id)


def test_a_cancelled_evaluation_stops_at_its_next_progress_write(
    scenario: DistillationScenario, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fedssl_coordinator.aggregator.evaluations import _Progress

    [row] = _listed(scenario)
    write_results = _Progress.on_results

    def cancel_first(self: Any, results: dict[str, float]) -> None:
        write_results(self, results)
        scenario.coordinator.client.cancel_evaluation(row.id)

    monkeypatch.setattr(_Progress, "on_results", cancel_first)
    monkeypatch.setattr(f"{COMPUTE}.PROGRESS_SECONDS", 0)
    _evaluate(scenario)
    [row] = _listed(scenario)
    assert row.state == JobState.CANCELLED
    assert row.progress is not None
    assert list(row.progress.results) == ["probe"]


def test_a_data_error_fails_the_evaluation_and_not_the_run(
    scenario: DistillationScenario, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise DataError("the images have another shape")

    with monkeypatch.context() as patch:
        patch.setattr(f"{COMPUTE}.detailed_evaluation", refuse)
        _evaluate(scenario)
    [row] = _listed(scenario)
    assert (row.state, row.reason) == (JobState.FAILED, "the images have another shape")
    assert scenario.run.state == RunState.RUNNING
    assert scenario.coordinator.client.request_evaluation(scenario.id, row.config, 0).state == JobState.QUEUED
    _evaluate(scenario)
    assert _listed(scenario)[0].state == JobState.COMPLETED


def test_a_temporary_failure_is_retried(scenario: DistillationScenario) -> None:
    """The images are missing from the store for a moment."""
    [row] = _listed(scenario)
    digest = row.dataset_digest
    path = scenario.coordinator.store / digest[:2] / digest[2:4] / digest
    content = path.read_bytes()
    path.unlink()
    _evaluate(scenario)
    [row] = _listed(scenario)
    assert (row.state, row.num_tries) == (JobState.RUNNING, 1)
    assert digest in str(row.reason)
    path.write_bytes(content)
    _pause_over(scenario)
    _evaluate(scenario)
    [row] = _listed(scenario)
    assert (row.state, row.reason) == (JobState.COMPLETED, None)


def test_a_diverged_encoder_has_null_results(scenario: DistillationScenario, monkeypatch: pytest.MonkeyPatch) -> None:
    from fedssl_coordinator.aggregator import evaluations

    load = evaluations.load_encoder

    def diverged(tensors: Any, spec: Any) -> Any:
        encoder = load(tensors, spec)
        torch.nn.init.constant_(next(encoder.parameters()), math.nan)
        return encoder

    monkeypatch.setattr(evaluations, "load_encoder", diverged)
    _evaluate(scenario)
    [row] = _listed(scenario)
    assert row.state == JobState.COMPLETED
    assert set((row.results or {}).values()) == {None}
    assert [m for m in scenario.coordinator.client.metrics(scenario.id) if m.name.startswith("evaluation/")] == []
    assert "training has diverged" in scenario.events("evaluation.completed")[0].message


# What the sweep finds


@pytest.fixture
def redis(servers: Servers) -> Iterator[Redis]:
    """Yield Redis without messages to evaluators, because no test of this file starts one."""
    with Redis.from_url(servers.redis_url) as broker:
        broker.delete("evaluate")
        yield broker


def _waiting(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the ids of the evaluations whose messages a sweep sends. The messages are lost."""
    from fedssl_coordinator.aggregator import tasks

    sent: list[str] = []
    with monkeypatch.context() as patch:
        patch.setattr(tasks.evaluate, "delay", sent.append)
        patch.setattr(tasks.advance_run, "delay", lambda run_id: None)
        tasks.sweep()
    return sent


def test_a_lost_message_is_sent_again_unless_a_process_works_on_the_job(
    redis: Redis, scenario: DistillationScenario, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fedssl_coordinator.core.db import exclusive
    from fedssl_coordinator.core.models import Evaluation
    from fedssl_coordinator.federation.jobs.repository import lock_name

    redis.delete("evaluate")
    [row] = _listed(scenario)
    assert _waiting(monkeypatch) == []  # a worker was notified just now
    scenario.tables.execute("UPDATE evaluations SET sent_at = sent_at - interval '11 seconds'")
    assert _waiting(monkeypatch) == [str(row.id)]
    assert _waiting(monkeypatch) == []
    scenario.tables.execute("UPDATE evaluations SET sent_at = NULL")
    with exclusive(lock_name(Evaluation, row.id)) as connection:
        assert connection is not None
        assert _waiting(monkeypatch) == []
        scenario.coordinator.evaluate(row.id)  # a second process does nothing
        assert _listed(scenario) == [row]
    scenario.coordinator.client.stop(scenario.id)  # a run that has finished leaves its evaluations to complete
    assert _waiting(monkeypatch) == [str(row.id)]
    _evaluate(scenario)
    scenario.tables.execute("UPDATE evaluations SET sent_at = NULL")
    assert _waiting(monkeypatch) == []
    assert _listed(scenario)[0].state == JobState.COMPLETED


def test_messages_do_not_pile_up_while_no_process_takes_them(redis: Redis, scenario: DistillationScenario) -> None:
    """This holds however long the jobs wait, and also if Redis loses messages meanwhile."""
    from fedssl_coordinator.aggregator.tasks import sweep

    def sweep_after_waiting(times: int) -> None:
        for _ in range(times):
            scenario.tables.execute("UPDATE evaluations SET sent_at = sent_at - interval '11 seconds'")
            sweep()

    scenario.train()
    assert [row.state for row in _listed(scenario)] == [JobState.QUEUED] * 2
    sweep_after_waiting(3)
    assert redis.llen("evaluate") == 2
    redis.lpop("evaluate")  # one is lost, and the coordinator does not know which
    sweep_after_waiting(3)
    assert redis.llen("evaluate") == 3
    redis.delete("evaluate")
    sweep_after_waiting(3)
    assert redis.llen("evaluate") == 2


@pytest.mark.changes_states
def test_a_job_to_retry_is_sent_behind_the_queued_jobs(redis: Redis, scenario: DistillationScenario) -> None:
    """Its own message was taken, and those of the other jobs are in the queue."""
    from fedssl_coordinator.aggregator.tasks import sweep

    scenario.train()
    begun = "sent_at = NULL, state = 'running', started_at = now()"
    scenario.tables.execute(f"UPDATE evaluations SET {begun} WHERE round_number = 0")
    sweep()
    assert redis.llen("evaluate") == 3


def test_a_run_can_be_deleted_while_its_evaluation_completes(scenario: DistillationScenario) -> None:
    """The metrics of the evaluation are the last rows that are written for the run."""
    from fedssl_coordinator.core.db import transaction
    from fedssl_coordinator.federation.evaluations import service

    [row] = _listed(scenario)
    scenario.coordinator.client.stop(scenario.id)
    with transaction() as session:
        assert service.begin(session, row.id) is not None
    answers: list[int] = []

    def delete() -> None:
        with scenario.coordinator.http() as http:
            answers.append(http.delete(f"/v1/runs/{scenario.id}").status_code)

    deleter = threading.Thread(target=delete)
    with transaction() as session:
        service.complete(session, row.id, {"probe": 0.5})
        deleter.start()
        deleter.join(0.5)
        assert deleter.is_alive()  # waits for the evaluation
    deleter.join(10)
    assert answers == [204]


def test_a_request_for_an_evaluation_conflicts_with_deleting_its_run(
    scenario: DistillationScenario, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fedssl_coordinator.federation.evaluations import service

    client, look = scenario.coordinator.client, service.datasets.of_project
    client.stop(scenario.id)

    def delete_first(*arguments: Any) -> Any:
        client.delete_run(scenario.id)
        return look(*arguments)

    monkeypatch.setattr(service.datasets, "of_project", delete_first)
    with pytest.raises(Conflict, match="deleted at the same moment"):
        client.request_evaluation(scenario.id, small_evaluation(measures=["knn"]), 0)
    monkeypatch.undo()
    with pytest.raises(NotFound):
        client.request_evaluation(scenario.id, small_evaluation(measures=["knn"]), 0)


def test_a_queued_evaluation_does_not_delay_the_run(scenario: DistillationScenario) -> None:
    scenario.train()
    assert {row.state for row in _listed(scenario)} == {JobState.QUEUED}
    assert (scenario.round.number, scenario.round.state) == (2, RoundState.OPEN)


def test_a_spec_without_an_evaluation_queues_none(coordinator: Coordinator) -> None:
    run = coordinator.client.create_run(tiny_spec()).id
    coordinator.advance(run)
    assert list(coordinator.client.evaluations(run)) == []
