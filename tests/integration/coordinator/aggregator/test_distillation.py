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
from support.distilling import DistillingCast, distilling_spec
from support.federation import tiny_spec
from support.methods import method_spec, shards
from support.tables import Tables


@pytest.fixture
def cast(coordinator: Coordinator, tables: Tables, tmp_path: Path) -> DistillingCast:
    return DistillingCast(coordinator, tables, tmp_path)


def _assert_simulated(cast: DistillingCast) -> None:
    """Check that the run has completed with the weights of its simulation."""
    run = cast.run
    assert run.outcome == Outcome.COMPLETED, run.reason
    assert run.model is not None
    deployed, simulated = cast.coordinator.tensors(run.model), simulate(cast.spec, shards(cast.spec)).model
    assert deployed.keys() == simulated.keys()
    assert [name for name in simulated if not torch.equal(deployed[name], simulated[name])] == []


def _finish(cast: DistillingCast) -> None:
    cast.distil()
    cast.coordinator.advance(cast.id)


def test_a_job_distils_the_updates_into_the_weights_of_the_run(cast: DistillingCast) -> None:
    run, job = cast.run, cast.job
    assert cast.round.state == RoundState.DISTILLING
    assert (job.state, job.round_number, job.epoch, job.num_epochs) == (JobState.QUEUED, 1, 0, 6)
    assert run.distillation == job
    assert cast.kinds()[-3:] == ["round.aggregating", "round.distilling", "distillation.queued"]
    cast.coordinator.advance(cast.id)  # a superfluous message
    assert len(cast.jobs) == 1
    cast.distil()
    done = cast.job
    assert (done.state, done.epoch, done.eta_seconds, done.checkpoint) == (JobState.COMPLETED, 6, None, None)
    assert done.loss is not None
    assert done.seconds_per_epoch is not None
    assert done.seconds_per_epoch > 0
    assert done.started_at is not None
    assert done.finished_at is not None
    assert done.started_at <= done.finished_at
    assert (cast.round.verdict, cast.run.rounds_closed, cast.run.distillation) == (Verdict.AGGREGATED, 1, None)
    assert cast.kinds("distillation.") == ["distillation.queued", "distillation.started", "distillation.completed"]
    assert {event.data["job"] for event in cast.events("distillation.completed")} == {str(job.id)}
    metrics = {m.name: m.value for m in cast.coordinator.client.metrics(cast.id) if m.client_id is None}
    assert metrics["distillation_loss"] == pytest.approx(done.loss)
    assert "loss" in metrics
    cast.coordinator.advance(cast.id)
    _assert_simulated(cast)
    assert cast.checkpoints() == []
    assert cast.left_over() == set()


def test_every_round_has_its_own_job(coordinator: Coordinator, tables: Tables, tmp_path: Path) -> None:
    cast = DistillingCast(coordinator, tables, tmp_path, distilling_spec(num_rounds=2))
    _finish(cast)
    cast.train()
    _finish(cast)
    assert [(job.round_number, job.state) for job in cast.jobs] == [(1, JobState.COMPLETED), (2, JobState.COMPLETED)]
    _assert_simulated(cast)


def test_training_before_the_first_round_is_a_job_too(coordinator: Coordinator, tables: Tables, tmp_path: Path) -> None:
    """FedCA trains its base model for a hundred epochs, which must not delay the aggregation of other runs."""
    cast = DistillingCast(coordinator, tables, tmp_path, method_spec("fedca"), train=False)
    [job] = cast.jobs
    assert (job.round_number, job.num_epochs, job.state) == (0, 5, JobState.QUEUED)
    assert cast.run.current_round is None
    cast.distil()
    assert cast.run.initial_model is not None
    simulated = simulate(cast.spec, shards(cast.spec)).initial
    deployed = coordinator.tensors(cast.run.initial_model)
    assert [name for name in simulated if not torch.equal(deployed[name], simulated[name])] == []
    coordinator.advance(cast.id)
    assert cast.round.state == RoundState.OPEN
    assert cast.events("distillation.completed")[0].message.startswith("before the first round: 5 epochs")


@pytest.mark.parametrize("name", ["fedsimclr", "orchestra", "scaffold", "fedrlc"])
def test_methods_that_only_combine_updates_have_no_jobs(coordinator: Coordinator, name: str) -> None:
    assert [method_spec(name).method.distillation_epochs(number) for number in (0, 1)] == [0, 0]
    assert list(coordinator.client.distillation_jobs(coordinator.client.create_run(tiny_spec()).id)) == []


def test_progress_is_written_at_intervals_and_at_the_end(cast: DistillingCast, monkeypatch: pytest.MonkeyPatch) -> None:
    from fedssl_coordinator.aggregator import distillation_checkpoints
    from fedssl_coordinator.federation.distillation import repository

    written, write = [], repository.set_while_running

    def note(session: Any, job_id: Any, **values: Any) -> bool:
        written.append(values)
        return write(session, job_id, **values)

    monkeypatch.setattr(repository, "set_while_running", note)
    monkeypatch.setattr(distillation_checkpoints, "PROGRESS_SECONDS", 60)
    cast.distil()
    assert [values["epoch"] for values in written] == [1, 6]
    assert all(values["seconds_per_epoch"] > 0 for values in written)


@pytest.mark.changes_states
def test_the_remaining_time_follows_from_the_speed_so_far(cast: DistillingCast, tables: Tables) -> None:
    assert cast.job.eta_seconds is None
    tables.execute(
        "UPDATE distillation_jobs SET state = 'running', epoch = 4, seconds_per_epoch = 1.5, started_at = now()"
    )
    assert cast.job.eta_seconds == pytest.approx(3.0)


def test_workers_neither_see_nor_cancel_jobs(cast: DistillingCast) -> None:
    token = cast.coordinator.worker_token("client-0")
    with cast.coordinator.http(token) as http:
        for method, path in (
            ("GET", f"/v1/distillation-jobs/{cast.job.id}"),
            ("POST", f"/v1/distillation-jobs/{cast.job.id}/cancel"),
            ("GET", f"/v1/runs/{cast.id}/distillation-jobs"),
        ):
            assert http.request(method, path).status_code == 403
    assert cast.job.state == JobState.QUEUED
    with pytest.raises(NotAllowed):
        cast.workers["client-0"]._connection.call("GET", f"/v1/distillation-jobs/{cast.job.id}", DistillationJobView)


def test_an_unknown_job_id_is_not_found(coordinator: Coordinator) -> None:
    for call in (coordinator.client.distillation_job, coordinator.client.cancel_distillation):
        with pytest.raises(NotFound, match="no distillation job"):
            call(uuid4())
    with pytest.raises(NotFound, match="no run"):
        list(coordinator.client.distillation_jobs(uuid4()))


# Cancelled


def test_a_cancelled_job_pauses_its_run_and_starts_again_when_it_is_resumed(cast: DistillingCast) -> None:
    client, first = cast.coordinator.client, cast.job
    cancelled = client.cancel_distillation(first.id)
    assert (cancelled.state, cancelled.finished_at is not None) == (JobState.CANCELLED, True)
    assert client.cancel_distillation(first.id) == cancelled  # a repeated cancellation is not an error
    run = cast.run
    assert (run.state, run.distillation) == (RunState.PAUSED, None)
    assert run.reason == "round 1: the distillation was cancelled; resume the run to start it again"
    assert cast.round.state == RoundState.DISTILLING
    assert cast.kinds()[-2:] == ["distillation.cancelled", "run.paused"]
    cast.coordinator.advance(cast.id)
    assert len(cast.jobs) == 1
    assert client.resume(cast.id).reason is None
    cast.coordinator.advance(cast.id)
    assert [job.state for job in cast.jobs] == [JobState.CANCELLED, JobState.QUEUED]
    _finish(cast)
    _assert_simulated(cast)
    with pytest.raises(Conflict, match="is completed: only a queued or running one"):
        client.cancel_distillation(cast.job.id)


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


@pytest.mark.parametrize("checkpoint_seconds", ["0", "30"])
def test_a_running_job_stops_at_its_next_epoch(
    cast: DistillingCast,
    monkeypatch: pytest.MonkeyPatch,
    change_settings: Callable[..., None],
    checkpoint_seconds: str,
) -> None:
    change_settings(CHECKPOINT_SECONDS=checkpoint_seconds)
    with monkeypatch.context() as patch:
        _Interrupted(patch, 3, lambda: cast.coordinator.client.cancel_distillation(cast.job.id))
        cast.distil()
    job = cast.job
    assert (job.state, job.epoch, job.checkpoint) == (JobState.CANCELLED, 2, None)
    assert job.reason == "cancelled by an operator after epoch 2 of 6"
    assert cast.checkpoints() == []
    assert cast.left_over() == set()
    cast.coordinator.client.resume(cast.id)
    cast.coordinator.advance(cast.id)
    _finish(cast)
    _assert_simulated(cast)


def test_stopping_a_run_ends_its_job(cast: DistillingCast, monkeypatch: pytest.MonkeyPatch) -> None:
    _Interrupted(monkeypatch, 2, lambda: cast.coordinator.client.stop(cast.id))
    cast.distil()
    assert (cast.job.state, cast.job.reason) == (JobState.CANCELLED, "run stopped: stopped by an operator")
    run = cast.run
    assert (run.outcome, run.rounds_closed, run.model) == (Outcome.STOPPED, 0, run.initial_model)
    assert cast.round.verdict == Verdict.FAILED
    assert cast.kinds()[-1] == "run.finished"


def test_a_job_that_was_stopped_at_the_very_end_publishes_nothing(
    cast: DistillingCast, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fedssl_coordinator.aggregator import distillation

    end = distillation._end

    def stop_first(*arguments: Any) -> None:
        cast.coordinator.client.stop(cast.id)
        end(*arguments)

    monkeypatch.setattr(distillation, "_end", stop_first)
    cast.distil()
    assert (cast.run.outcome, cast.run.rounds_closed) == (Outcome.STOPPED, 0)
    assert cast.job.state == JobState.CANCELLED


def test_a_job_in_progress_continues_while_its_run_is_paused(
    cast: DistillingCast, monkeypatch: pytest.MonkeyPatch
) -> None:
    _Interrupted(monkeypatch, 2, lambda: cast.coordinator.client.pause(cast.id))
    cast.distil()
    assert (cast.job.state, cast.run.state, cast.run.rounds_closed) == (JobState.COMPLETED, RunState.PAUSED, 1)
    cast.coordinator.client.resume(cast.id)
    cast.coordinator.advance(cast.id)
    _assert_simulated(cast)


def test_a_queued_job_does_not_start_while_its_run_is_paused(cast: DistillingCast) -> None:
    cast.coordinator.client.pause(cast.id)
    cast.distil()
    assert (cast.job.state, cast.job.num_tries) == (JobState.QUEUED, 0)
    cast.coordinator.client.resume(cast.id)
    assert len(cast.jobs) == 1
    _finish(cast)
    _assert_simulated(cast)


# Failed


def test_a_method_error_fails_the_job_and_its_run(cast: DistillingCast, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise MethodError("the distillation's loss is not a finite number: lower its optimiser's learning_rate")

    monkeypatch.setattr("fedssl_coordinator.aggregator.rounds.run_aggregation", refuse)
    cast.distil()
    assert cast.job.state == JobState.FAILED
    assert cast.job.reason == "the distillation's loss is not a finite number: lower its optimiser's learning_rate"
    assert cast.run.outcome == Outcome.FAILED
    assert cast.run.reason == f"round 1: {cast.job.reason}"
    assert cast.round.verdict == Verdict.FAILED
    assert cast.kinds("distillation.")[-1] == "distillation.failed"


@pytest.mark.parametrize("without_quorum", ["fail", "skip"])
def test_too_few_usable_updates_end_the_job_before_it_trains(
    coordinator: Coordinator, tables: Tables, tmp_path: Path, without_quorum: str
) -> None:
    """Every factor has rows of norm 1, above the limit. The round is skipped or the run fails, as in its simulation."""
    spec = distilling_spec(
        robustness={"max_feature_norm": 0.5, "action": "reject"},
        cohort={"min_clients": 3, "without_quorum": without_quorum},
    )
    cast = DistillingCast(coordinator, tables, tmp_path, spec)
    _finish(cast)
    assert (cast.job.state, cast.job.epoch) == (JobState.FAILED, 0)
    assert "3 of 3 updates were rejected" in str(cast.job.reason)
    assert {a.state for a in cast.round.assignments} == {"rejected"}
    if without_quorum == "fail":
        assert cast.run.outcome == Outcome.FAILED
        assert "its update_feature_norm 1" in str(cast.run.reason)
        with pytest.raises(MethodError, match="3 of 3 updates were rejected"):
            simulate(spec, shards(spec))
    else:
        assert cast.round.verdict == Verdict.SKIPPED
        _assert_simulated(cast)


def test_missing_public_images_fail_a_run_that_has_not_started(
    coordinator: Coordinator, tables: Tables, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fedssl.errors import DataError

    def refuse(*_: object) -> None:
        raise DataError("digits is not here")

    monkeypatch.setattr("fedssl_coordinator.aggregator.rounds._public_images", refuse)
    cast = DistillingCast(coordinator, tables, tmp_path, method_spec("fedca"), train=False)
    cast.distil()
    assert (cast.run.outcome, cast.run.reason, cast.job.state) == (
        Outcome.FAILED,
        "digits is not here",
        JobState.FAILED,
    )


def test_a_temporary_failure_is_retried_after_pauses_that_double(
    cast: DistillingCast, monkeypatch: pytest.MonkeyPatch
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
            cast.distil()
            seconds = cast.tables.one("SELECT round(extract(epoch FROM retry_at - now())) FROM distillation_jobs")
            pauses.append(int(seconds))
            before = cast.job
            cast.distil()  # the pause is not over
            assert cast.job == before
            cast.pause_over()
    assert pauses == [2, 4, 8]
    assert (cast.job.state, cast.job.num_tries) == (JobState.RUNNING, 3)
    assert cast.job.reason == "MemoryError: no room; it is tried again"
    assert [event.message for event in cast.events("distillation.stalled")] == [
        "try 1: MemoryError: no room; it is tried again",
        "try 2: DataError: the share is not mounted; it is tried again",
    ]
    _finish(cast)
    assert cast.job.reason is None
    _assert_simulated(cast)


def test_a_failed_gpu_ends_the_process(cast: DistillingCast, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only a new process can use the GPU again. The job waits for one."""
    from celery.exceptions import WorkerShutdown

    def fail(*_: object, **__: object) -> None:
        raise torch.AcceleratorError("an illegal memory access was encountered")

    with monkeypatch.context() as patch:
        patch.setattr("fedssl_coordinator.aggregator.rounds.run_aggregation", fail)
        with pytest.raises(WorkerShutdown):
            cast.distil()
    assert cast.job.reason == "AcceleratorError: an illegal memory access was encountered; it is tried again"
    cast.pause_over()
    _finish(cast)
    _assert_simulated(cast)


@pytest.mark.parametrize("device", ["cuda:7", "auto"])
def test_the_settings_choose_the_device(
    cast: DistillingCast, change_settings: Callable[..., None], device: str
) -> None:
    change_settings(DEVICE=device)
    cast.distil()
    if device == "auto":
        assert cast.job.state == JobState.COMPLETED
    else:
        assert "FEDSSL_DEVICE is cuda:7, which is not on this machine" in str(cast.job.reason)
        assert cast.job.state == JobState.RUNNING


# Several processes at once


def test_a_second_process_does_not_touch_a_job_in_progress(
    cast: DistillingCast, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second process returns at once and does not disturb the first."""
    seen: list[DistillationJobView] = []

    def meanwhile() -> None:
        other = threading.Thread(target=cast.distil)
        other.start()
        other.join(20)
        assert not other.is_alive()
        seen.append(cast.job)

    _Interrupted(monkeypatch, 3, meanwhile)
    cast.distil()
    assert [(job.state, job.num_tries) for job in seen] == [(JobState.RUNNING, 1)]
    assert cast.kinds("distillation.") == ["distillation.queued", "distillation.started", "distillation.completed"]


def test_a_process_that_lost_its_connection_writes_nothing_more(
    coordinator: Coordinator, cast: DistillingCast, tables: Tables, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its lock was lost with the connection, so another process may work on the job: only that one's results count."""

    def lose_the_lock() -> None:
        assert tables.one("SELECT count(pg_terminate_backend(pid)) FROM pg_locks WHERE locktype = 'advisory'") == 1

    with monkeypatch.context() as patch:
        _Interrupted(patch, 3, lose_the_lock)
        cast.distil()
    assert (cast.job.state, cast.job.epoch, cast.run.rounds_closed) == (JobState.RUNNING, 2, 0)
    cast.pause_over()
    _finish(cast)
    _assert_simulated(cast)
    [stalled] = coordinator.client.event_log(cast.id, "distillation.stalled")
    assert "or lost its connection to Postgres" in stalled.message


def test_a_list_of_jobs_is_complete_at_any_page_size(
    coordinator: Coordinator, cast: DistillingCast, tables: Tables
) -> None:
    for _ in range(3):
        coordinator.client.cancel_distillation(cast.job.id)
        coordinator.client.resume(cast.id)
        coordinator.advance(cast.id)
    tables.execute(
        "UPDATE distillation_jobs SET created_at = '2026-01-01 12:00:00.000001+02' WHERE state = 'cancelled'"
    )
    expected = [job_id for (job_id,) in tables.query("SELECT id::text FROM distillation_jobs ORDER BY created_at, id")]
    with coordinator.http() as http:
        for limit in (1, 2, 4, 100):
            found, query = [], {"limit": str(limit)}
            while True:
                page = http.get(f"/v1/runs/{cast.id}/distillation-jobs", params=query).json()
                found += [item["id"] for item in page["items"]]
                if page["next_cursor"] is None:
                    break
                query["cursor"] = page["next_cursor"]
            assert found == expected
