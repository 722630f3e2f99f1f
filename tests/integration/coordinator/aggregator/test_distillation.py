"""Distillation jobs: from a round's updates to its weights, with progress, cancellation, failures and retries."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import torch

from fedssl.client import Conflict, NotAllowed, NotFound
from fedssl.errors import MethodError
from fedssl.protocol.states import JobState, Outcome, RoundState, RunState, Verdict
from fedssl.protocol.views import DistillationJobView
from fedssl.simulation import simulate
from support.coordinator import Coordinator
from support.distillation_scenario import DistillationScenario, distillation_spec
from support.federation import tiny_spec
from support.methods import method_spec, shards, simulation_of
from support.tables import Tables


@pytest.fixture
def scenario(coordinator: Coordinator, tables: Tables, tmp_path: Path) -> DistillationScenario:
    return DistillationScenario(coordinator, tables, tmp_path)


def _assert_simulated(scenario: DistillationScenario) -> None:
    """Check that the run has completed with the weights of its simulation."""
    run = scenario.run
    assert run.outcome == Outcome.COMPLETED, run.reason
    assert run.model is not None
    deployed, simulated = scenario.coordinator.tensors(run.model), simulation_of(scenario.spec).model
    assert deployed.keys() == simulated.keys()
    assert [name for name in simulated if not torch.equal(deployed[name], simulated[name])] == []


def _finish(scenario: DistillationScenario) -> None:
    scenario.distil()
    scenario.coordinator.advance(scenario.id)


def test_a_job_distils_the_updates_into_the_weights_of_the_run(scenario: DistillationScenario) -> None:
    run, job = scenario.run, scenario.job
    assert scenario.round.state == RoundState.DISTILLING
    assert (job.state, job.round_number, job.epoch, job.num_epochs) == (JobState.QUEUED, 1, 0, 6)
    assert run.distillation == job
    assert scenario.kinds()[-3:] == ["round.aggregating", "round.distilling", "distillation.queued"]
    scenario.coordinator.advance(scenario.id)  # a superfluous message
    assert len(scenario.jobs) == 1
    scenario.distil()
    done = scenario.job
    assert (done.state, done.epoch, done.eta_seconds, done.checkpoint) == (JobState.COMPLETED, 6, None, None)
    assert done.loss is not None
    assert done.seconds_per_epoch is not None
    assert done.seconds_per_epoch > 0
    assert done.started_at is not None
    assert done.finished_at is not None
    assert done.started_at <= done.finished_at
    assert (scenario.round.verdict, scenario.run.rounds_closed, scenario.run.distillation) == (
        Verdict.AGGREGATED,
        1,
        None,
    )
    assert scenario.kinds("distillation.") == ["distillation.queued", "distillation.started", "distillation.completed"]
    assert {event.data["job"] for event in scenario.events("distillation.completed")} == {str(job.id)}
    metrics = {m.name: m.value for m in scenario.coordinator.client.metrics(scenario.id) if m.client_id is None}
    assert metrics["distillation_loss"] == pytest.approx(done.loss)
    assert "loss" in metrics
    scenario.coordinator.advance(scenario.id)
    _assert_simulated(scenario)
    assert scenario.checkpoints() == []
    assert scenario.orphaned_files() == set()


def test_every_round_has_its_own_job(coordinator: Coordinator, tables: Tables, tmp_path: Path) -> None:
    scenario = DistillationScenario(coordinator, tables, tmp_path, distillation_spec(num_rounds=2))
    _finish(scenario)
    scenario.train()
    _finish(scenario)
    assert [(job.round_number, job.state) for job in scenario.jobs] == [
        (1, JobState.COMPLETED),
        (2, JobState.COMPLETED),
    ]
    _assert_simulated(scenario)


def test_training_before_the_first_round_is_a_job_too(coordinator: Coordinator, tables: Tables, tmp_path: Path) -> None:
    """FedCA trains its base model for a hundred epochs, which must not delay the aggregation of other runs."""
    scenario = DistillationScenario(coordinator, tables, tmp_path, method_spec("fedca"), train=False)
    [job] = scenario.jobs
    assert (job.round_number, job.num_epochs, job.state) == (0, 5, JobState.QUEUED)
    assert scenario.run.current_round is None
    scenario.distil()
    assert scenario.run.initial_model is not None
    simulated = simulation_of(scenario.spec).initial
    deployed = coordinator.tensors(scenario.run.initial_model)
    assert [name for name in simulated if not torch.equal(deployed[name], simulated[name])] == []
    coordinator.advance(scenario.id)
    assert scenario.round.state == RoundState.OPEN
    assert scenario.events("distillation.completed")[0].message.startswith("before the first round: 5 epochs")


@pytest.mark.parametrize("name", ["fedsimclr", "orchestra", "scaffold", "fedrlc"])
def test_methods_that_only_combine_updates_have_no_jobs(coordinator: Coordinator, name: str) -> None:
    assert [method_spec(name).method.distillation_epochs(number) for number in (0, 1)] == [0, 0]
    assert list(coordinator.client.distillation_jobs(coordinator.client.create_run(tiny_spec()).id)) == []


def test_progress_is_written_at_intervals_and_at_the_end(
    scenario: DistillationScenario, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fedssl_coordinator.aggregator import distillation_checkpoints
    from fedssl_coordinator.federation.distillation import repository

    written, write = [], repository.set_while_running

    def note(session: Any, job_id: Any, **values: Any) -> bool:
        written.append(values)
        return write(session, job_id, **values)

    monkeypatch.setattr(repository, "set_while_running", note)
    monkeypatch.setattr(distillation_checkpoints, "PROGRESS_SECONDS", 60)
    scenario.distil()
    assert [values["epoch"] for values in written] == [1, 6]
    assert all(values["seconds_per_epoch"] > 0 for values in written)


@pytest.mark.changes_states
def test_the_remaining_time_follows_from_the_speed_so_far(scenario: DistillationScenario, tables: Tables) -> None:
    assert scenario.job.eta_seconds is None
    tables.execute(
        "UPDATE distillation_jobs SET state = 'running', epoch = 4, seconds_per_epoch = 1.5, started_at = now()"
    )
    assert scenario.job.eta_seconds == pytest.approx(3.0)


def test_workers_neither_see_nor_cancel_jobs(scenario: DistillationScenario) -> None:
    token = scenario.coordinator.worker_token("client-0")
    with scenario.coordinator.http(token) as http:
        for method, path in (
            ("GET", f"/v1/distillation-jobs/{scenario.job.id}"),
            ("POST", f"/v1/distillation-jobs/{scenario.job.id}/cancel"),
            ("GET", f"/v1/runs/{scenario.id}/distillation-jobs"),
        ):
            assert http.request(method, path).status_code == 403
    assert scenario.job.state == JobState.QUEUED
    with pytest.raises(NotAllowed):
        scenario.workers["client-0"]._connection.call(
            "GET", f"/v1/distillation-jobs/{scenario.job.id}", DistillationJobView
        )


def test_an_unknown_job_id_is_not_found(coordinator: Coordinator) -> None:
    for call in (coordinator.client.distillation_job, coordinator.client.cancel_distillation):
        with pytest.raises(NotFound, match="no distillation job"):
            call(uuid4())
    with pytest.raises(NotFound, match="no run"):
        list(coordinator.client.distillation_jobs(uuid4()))


# Cancelled


def test_a_cancelled_job_pauses_its_run_and_starts_again_when_it_is_resumed(scenario: DistillationScenario) -> None:
    client, first = scenario.coordinator.client, scenario.job
    cancelled = client.cancel_distillation(first.id)
    assert (cancelled.state, cancelled.finished_at is not None) == (JobState.CANCELLED, True)
    assert client.cancel_distillation(first.id) == cancelled  # a repeated cancellation is not an error
    run = scenario.run
    assert (run.state, run.distillation) == (RunState.PAUSED, None)
    assert run.reason == "round 1: the distillation was cancelled; resume the run to start it again"
    assert scenario.round.state == RoundState.DISTILLING
    assert scenario.kinds()[-2:] == ["distillation.cancelled", "run.paused"]
    scenario.coordinator.advance(scenario.id)
    assert len(scenario.jobs) == 1
    assert client.resume(scenario.id).reason is None
    scenario.coordinator.advance(scenario.id)
    assert [job.state for job in scenario.jobs] == [JobState.CANCELLED, JobState.QUEUED]
    _finish(scenario)
    _assert_simulated(scenario)
    with pytest.raises(Conflict, match="is completed: only a queued or running one"):
        client.cancel_distillation(scenario.job.id)


class _Interrupted:
    """Makes something happen after an epoch of a running job, before its progress is recorded."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, epoch: int, what: Any) -> None:
        from fedssl_coordinator.aggregator import distillation_checkpoints

        told = distillation_checkpoints.Training.on_epoch

        def on_epoch(self: Any, progress: Any) -> None:
            if progress.epoch == epoch:
                what()
            told(self, progress)

        monkeypatch.setattr(distillation_checkpoints.Training, "on_epoch", on_epoch)
        monkeypatch.setattr(distillation_checkpoints, "PROGRESS_SECONDS", 0)


@pytest.mark.full(but=1)
@pytest.mark.parametrize("checkpoint_seconds", ["0", "30"])
def test_a_running_job_stops_at_its_next_epoch(
    scenario: DistillationScenario,
    monkeypatch: pytest.MonkeyPatch,
    change_settings: Callable[..., None],
    checkpoint_seconds: str,
) -> None:
    change_settings(CHECKPOINT_SECONDS=checkpoint_seconds)
    with monkeypatch.context() as patch:
        _Interrupted(patch, 3, lambda: scenario.coordinator.client.cancel_distillation(scenario.job.id))
        scenario.distil()
    job = scenario.job
    assert (job.state, job.epoch, job.checkpoint) == (JobState.CANCELLED, 2, None)
    assert job.reason == "cancelled by an operator after epoch 2 of 6"
    assert scenario.checkpoints() == []
    assert scenario.orphaned_files() == set()
    scenario.coordinator.client.resume(scenario.id)
    scenario.coordinator.advance(scenario.id)
    _finish(scenario)
    _assert_simulated(scenario)


def test_stopping_a_run_ends_its_job(scenario: DistillationScenario, monkeypatch: pytest.MonkeyPatch) -> None:
    _Interrupted(monkeypatch, 2, lambda: scenario.coordinator.client.stop(scenario.id))
    scenario.distil()
    assert (scenario.job.state, scenario.job.reason) == (JobState.CANCELLED, "run stopped: stopped by an operator")
    run = scenario.run
    assert (run.outcome, run.rounds_closed, run.model) == (Outcome.STOPPED, 0, run.initial_model)
    assert scenario.round.verdict == Verdict.FAILED
    assert scenario.kinds()[-1] == "run.finished"


def test_a_job_that_was_stopped_at_the_very_end_publishes_nothing(
    scenario: DistillationScenario, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fedssl_coordinator.aggregator import distillation

    end = distillation._end

    def stop_first(*arguments: Any) -> None:
        scenario.coordinator.client.stop(scenario.id)
        end(*arguments)

    monkeypatch.setattr(distillation, "_end", stop_first)
    scenario.distil()
    assert (scenario.run.outcome, scenario.run.rounds_closed) == (Outcome.STOPPED, 0)
    assert scenario.job.state == JobState.CANCELLED


def test_a_job_in_progress_continues_while_its_run_is_paused(
    scenario: DistillationScenario, monkeypatch: pytest.MonkeyPatch
) -> None:
    _Interrupted(monkeypatch, 2, lambda: scenario.coordinator.client.pause(scenario.id))
    scenario.distil()
    assert (scenario.job.state, scenario.run.state, scenario.run.rounds_closed) == (
        JobState.COMPLETED,
        RunState.PAUSED,
        1,
    )
    scenario.coordinator.client.resume(scenario.id)
    scenario.coordinator.advance(scenario.id)
    _assert_simulated(scenario)


def test_a_queued_job_does_not_start_while_its_run_is_paused(scenario: DistillationScenario) -> None:
    scenario.coordinator.client.pause(scenario.id)
    scenario.distil()
    assert (scenario.job.state, scenario.job.num_tries) == (JobState.QUEUED, 0)
    scenario.coordinator.client.resume(scenario.id)
    assert len(scenario.jobs) == 1
    _finish(scenario)
    _assert_simulated(scenario)


# Failed


def test_a_method_error_fails_the_job_and_its_run(
    scenario: DistillationScenario, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise MethodError("the distillation's loss is not a finite number: lower its optimiser's learning_rate")

    monkeypatch.setattr("fedssl_coordinator.aggregator.rounds.run_aggregation", refuse)
    scenario.distil()
    assert scenario.job.state == JobState.FAILED
    assert scenario.job.reason == "the distillation's loss is not a finite number: lower its optimiser's learning_rate"
    assert scenario.run.outcome == Outcome.FAILED
    assert scenario.run.reason == f"round 1: {scenario.job.reason}"
    assert scenario.round.verdict == Verdict.FAILED
    assert scenario.kinds("distillation.")[-1] == "distillation.failed"


@pytest.mark.parametrize("without_quorum", ["fail", "skip"])
def test_too_few_usable_updates_end_the_job_before_it_trains(
    coordinator: Coordinator, tables: Tables, tmp_path: Path, without_quorum: str
) -> None:
    """Every factor has rows of norm 1, above the limit. The round is skipped or the run fails, as in its simulation."""
    spec = distillation_spec(
        robustness={"max_feature_norm": 0.5, "action": "reject"},
        cohort={"min_clients": 3, "without_quorum": without_quorum},
    )
    scenario = DistillationScenario(coordinator, tables, tmp_path, spec)
    _finish(scenario)
    assert (scenario.job.state, scenario.job.epoch) == (JobState.FAILED, 0)
    assert "3 of 3 updates were rejected" in str(scenario.job.reason)
    assert {a.state for a in scenario.round.assignments} == {"rejected"}
    if without_quorum == "fail":
        assert scenario.run.outcome == Outcome.FAILED
        assert "its update_feature_norm 1" in str(scenario.run.reason)
        with pytest.raises(MethodError, match="3 of 3 updates were rejected"):
            simulate(spec, shards(spec))
    else:
        assert scenario.round.verdict == Verdict.SKIPPED
        _assert_simulated(scenario)


def test_missing_public_images_fail_a_run_that_has_not_started(
    coordinator: Coordinator, tables: Tables, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fedssl.errors import DataError

    def refuse(*_: object) -> None:
        raise DataError("digits is not here")

    monkeypatch.setattr("fedssl_coordinator.aggregator.rounds._public_images", refuse)
    scenario = DistillationScenario(coordinator, tables, tmp_path, method_spec("fedca"), train=False)
    scenario.distil()
    assert (scenario.run.outcome, scenario.run.reason, scenario.job.state) == (
        Outcome.FAILED,
        "digits is not here",
        JobState.FAILED,
    )


def test_a_temporary_failure_is_retried_after_pauses_that_double(
    scenario: DistillationScenario, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that has begun does not fail because images are missing or memory is short for a moment."""
    from fedssl.errors import DataError

    errors = [MemoryError("no room"), DataError("the share is not mounted"), MemoryError("no room")]

    def fail(*_: object, **__: object) -> None:
        raise errors.pop(0)

    pauses = []
    with monkeypatch.context() as patch:
        patch.setattr("fedssl_coordinator.aggregator.rounds.run_aggregation", fail)
        for _ in range(3):
            scenario.distil()
            seconds = scenario.tables.one("SELECT round(extract(epoch FROM retry_at - now())) FROM distillation_jobs")
            pauses.append(int(seconds))
            before = scenario.job
            scenario.distil()  # the pause is not over
            assert scenario.job == before
            scenario.end_pause()
    assert pauses == [2, 4, 8]
    assert (scenario.job.state, scenario.job.num_tries) == (JobState.RUNNING, 3)
    assert scenario.job.reason == "MemoryError: no room; it is tried again"
    assert [event.message for event in scenario.events("distillation.stalled")] == [
        "try 1: MemoryError: no room; it is tried again",
        "try 2: DataError: the share is not mounted; it is tried again",
    ]
    _finish(scenario)
    assert scenario.job.reason is None
    _assert_simulated(scenario)


def test_a_failed_gpu_ends_the_process(scenario: DistillationScenario, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only a new process can use the GPU again. The job waits for one."""
    from celery.exceptions import WorkerShutdown

    def fail(*_: object, **__: object) -> None:
        raise torch.AcceleratorError("an illegal memory access was encountered")

    with monkeypatch.context() as patch:
        patch.setattr("fedssl_coordinator.aggregator.rounds.run_aggregation", fail)
        with pytest.raises(WorkerShutdown):
            scenario.distil()
    assert scenario.job.reason == "AcceleratorError: an illegal memory access was encountered; it is tried again"
    scenario.end_pause()
    _finish(scenario)
    _assert_simulated(scenario)


@pytest.mark.parametrize("device", ["cuda:7", "auto"])
def test_the_settings_choose_the_device(
    scenario: DistillationScenario, change_settings: Callable[..., None], device: str
) -> None:
    change_settings(DEVICE=device)
    scenario.distil()
    if device == "auto":
        assert scenario.job.state == JobState.COMPLETED
    else:
        assert "FEDSSL_DEVICE is cuda:7, which is not on this machine" in str(scenario.job.reason)
        assert scenario.job.state == JobState.RUNNING


# Several processes at once


def test_a_second_process_does_not_touch_a_job_in_progress(
    scenario: DistillationScenario, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second process returns at once and does not disturb the first."""
    seen: list[DistillationJobView] = []

    def meanwhile() -> None:
        other = threading.Thread(target=scenario.distil)
        other.start()
        other.join(20)
        assert not other.is_alive()
        seen.append(scenario.job)

    _Interrupted(monkeypatch, 3, meanwhile)
    scenario.distil()
    assert [(job.state, job.num_tries) for job in seen] == [(JobState.RUNNING, 1)]
    assert scenario.kinds("distillation.") == ["distillation.queued", "distillation.started", "distillation.completed"]


def test_a_process_that_lost_its_connection_writes_nothing_more(
    coordinator: Coordinator, scenario: DistillationScenario, tables: Tables, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its lock was lost with the connection, so another process may work on the job: only that one's results count."""

    def lose_the_lock() -> None:
        assert tables.one("SELECT count(pg_terminate_backend(pid)) FROM pg_locks WHERE locktype = 'advisory'") == 1

    with monkeypatch.context() as patch:
        _Interrupted(patch, 3, lose_the_lock)
        scenario.distil()
    assert (scenario.job.state, scenario.job.epoch, scenario.run.rounds_closed) == (JobState.RUNNING, 2, 0)
    scenario.end_pause()
    _finish(scenario)
    _assert_simulated(scenario)
    [stalled] = coordinator.client.event_log(scenario.id, "distillation.stalled")
    assert "or lost its connection to Postgres" in stalled.message


def test_a_list_of_jobs_is_complete_at_any_page_size(
    coordinator: Coordinator, scenario: DistillationScenario, tables: Tables
) -> None:
    for _ in range(3):
        coordinator.client.cancel_distillation(scenario.job.id)
        coordinator.client.resume(scenario.id)
        coordinator.advance(scenario.id)
    tables.execute(
        "UPDATE distillation_jobs SET created_at = '2026-01-01 12:00:00.000001+02' WHERE state = 'cancelled'"
    )
    expected = [job_id for (job_id,) in tables.query("SELECT id::text FROM distillation_jobs ORDER BY created_at, id")]
    with coordinator.http() as http:
        for limit in (1, 2, 4, 100):
            found, query = [], {"limit": str(limit)}
            while True:
                page = http.get(f"/v1/runs/{scenario.id}/distillation-jobs", params=query).json()
                found += [item["id"] for item in page["items"]]
                if page["next_cursor"] is None:
                    break
                query["cursor"] = page["next_cursor"]
            assert found == expected
