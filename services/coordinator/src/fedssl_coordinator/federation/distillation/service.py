"""Distillation jobs, as far as they differ from other jobs. Everything here is quick: the aggregator trains.

A job's state changes under its run's row lock, like the states of the run's rounds.
"""

from typing import Any
from uuid import UUID

from sqlalchemy.orm import Session

from fedssl.protocol.states import JobState, RunState
from fedssl.protocol.views import DistillationJobView
from fedssl.wording import plural
from fedssl_coordinator.core import enqueue
from fedssl_coordinator.core.audit import record
from fedssl_coordinator.core.db import after_commit
from fedssl_coordinator.core.models import DistillationJob, Run
from fedssl_coordinator.core.problems import printable
from fedssl_coordinator.federation import retries, run_rows
from fedssl_coordinator.federation.distillation import repository
from fedssl_coordinator.federation.jobs import repository as job_rows
from fedssl_coordinator.federation.jobs import service as jobs
from fedssl_coordinator.federation.jobs.service import StartedJob
from fedssl_coordinator.federation.transitions import about, pause
from fedssl_coordinator.storage.artifacts.removal import release


def ensure_queued(session: Session, run: Run, round_number: int, num_epochs: int) -> None:
    """Queue the training on the coordinator in this round, unless a job of the run is unfinished.

    It has its own queue, so no other computation waits for it. The caller holds the run's lock.
    """
    if repository.unfinished(session, run.id) is not None:
        return
    job = repository.add(session, run.id, round_number, num_epochs)
    record(session, "distillation.queued", f"{plural(num_epochs, 'epoch')}, {_when(job)}", **about(job))
    enqueue.distil(session, job.id)
    enqueue.wake_watchers(session)


def resume(session: Session, run: Run) -> None:
    """Retry the job of a resumed run now. The caller holds the run's lock."""
    if (job := repository.unfinished(session, run.id)) is not None:
        retries.reset(session, job)
        enqueue.distil(session, job.id)


def begin(session: Session, job_id: UUID) -> StartedJob[DistillationJob] | None:
    """Count an attempt at a job whose lock the caller holds. Returns None if there is nothing to do at this time."""
    job = job_rows.locked(session, DistillationJob, job_id)
    if job is None:
        return None
    run = run_rows.get_one(session, job.run_id)
    if job.state != JobState.RUNNING and run.state != RunState.RUNNING:
        return None
    if job.state == JobState.RUNNING and retries.is_quarantined(job):
        if run.state == RunState.RUNNING:
            what = f"{_when(job)}: the distillation"
            pause(session, run, f"{retries.quarantine_reason(job, what)}, and resume the run to try it again")
            enqueue.wake_watchers(session)
        return None
    return jobs.begin(session, job, f"{_when(job)}: the training begins")


def record_resumption(session: Session, started: StartedJob[DistillationJob], epoch: int) -> None:
    """Record that a job continues after this epoch (0: from the beginning), where an earlier attempt left it."""
    job = started.job
    if repository.set_while_running(session, job.id, epoch=epoch) and started.is_reported:
        where = f"continues after epoch {epoch} of {job.num_epochs}" if epoch else "starts again: nothing was saved"
        record(session, "distillation.resumed", where, **about(job, {"epoch": epoch}))
        enqueue.wake_watchers(session)


def drop_checkpoint(session: Session, job_id: UUID, why: str) -> None:
    """Start again from scratch after a pause, because the checkpoint cannot be used."""
    if (job := jobs.running(session, DistillationJob, job_id)) is not None:
        _release_checkpoint(session, job)
        job.checkpoint = None
        retries.record_failure(session, job, why)


def still_running(session: Session, job_id: UUID) -> tuple[Run, DistillationJob] | None:
    """Return the job and its run, locked, or None if the job was cancelled."""
    job = jobs.running(session, DistillationJob, job_id)
    return None if job is None else (run_rows.get_one(session, job.run_id), job)


def complete(session: Session, job: DistillationJob) -> None:
    """End a job that has done its work. The caller holds the run's lock."""
    loss = "" if job.loss is None else f", loss {job.loss:.4f}"
    message = f"{_when(job)}: {plural(job.num_epochs, 'epoch')}{loss}"
    _end(session, job, JobState.COMPLETED, message, epoch=job.num_epochs, reason=None)


def fail(session: Session, job: DistillationJob, reason: str) -> None:
    """End a job that can never succeed. The caller holds the run's lock, and ends the run, or the round."""
    _end(session, job, JobState.FAILED, f"{_when(job)}: {printable(reason)}", reason=printable(reason))


def end_unfinished(session: Session, run: Run, reason: str) -> None:
    """End the job of a run that ends. The caller holds the run's lock."""
    if (job := repository.unfinished(session, run.id)) is not None:
        _end(session, job, JobState.CANCELLED, f"{_when(job)}: {reason}", reason=reason)


def cancel(session: Session, job_id: UUID) -> DistillationJobView:
    """Cancel a job and pause its run. When the run is resumed, it queues another job for the same round.

    Does nothing if the job was cancelled before. Raises ProblemError.
    """
    job = jobs.locked(session, DistillationJob, job_id)
    if jobs.is_cancelled(job):
        return view(job)
    run = run_rows.get_one(session, job.run_id)
    reason = f"{_when(job)}: the distillation was cancelled; resume the run to start it again"
    where = f"cancelled by an operator after epoch {job.epoch} of {job.num_epochs}"
    _end(session, job, JobState.CANCELLED, f"{_when(job)}: {where}", reason=where)
    pause(session, run, reason)
    enqueue.wake_watchers(session)
    return show(session, job_id)


def show(session: Session, job_id: UUID) -> DistillationJobView:
    """Return the view of a job. Raises ProblemError if it does not exist."""
    return view(jobs.get(session, DistillationJob, job_id))


def view(job: DistillationJob) -> DistillationJobView:
    """Return what the API shows of a job, with the time that is left at the speed so far."""
    left = None
    if job.state == JobState.RUNNING and job.seconds_per_epoch is not None:
        left = (job.num_epochs - job.epoch) * job.seconds_per_epoch
    values = {name: getattr(job, name) for name in DistillationJobView.model_fields if name != "eta_seconds"}
    return DistillationJobView(**values, eta_seconds=left)


def _end(session: Session, job: DistillationJob, state: JobState, message: str, **values: Any) -> None:
    _release_checkpoint(session, job)
    jobs.end(session, job, state, message, checkpoint=None, **values)


def _release_checkpoint(session: Session, job: DistillationJob) -> None:
    """Remove the checkpoint after the commit, when nothing refers to it any more."""
    if job.checkpoint is not None:
        after_commit(session, release, job.checkpoint)


def _when(job: DistillationJob) -> str:
    return f"round {job.round_number}" if job.round_number else "before the first round"
