"""Distillation jobs, from the queue to their end. Everything here is quick; what trains is in `compute`.

Whoever changes a job's state holds its run's row lock, as for the run's rounds. How far a running job has come is
written by the one process that works on it, which holds the job's own lock meanwhile.
"""

from collections.abc import Sequence
from datetime import datetime
from typing import Any, NamedTuple
from uuid import UUID

from sqlalchemy import func
from sqlalchemy.orm import Session

from fedssl.protocol.states import JobState, RunState
from fedssl.protocol.views import DistillationJobView
from fedssl_coordinator.core import enqueue
from fedssl_coordinator.core.audit import record
from fedssl_coordinator.core.db import after_commit
from fedssl_coordinator.core.models import DistillationJob, Run
from fedssl_coordinator.core.problems import ProblemError, printable
from fedssl_coordinator.federation import retries
from fedssl_coordinator.federation.distillation import repository
from fedssl_coordinator.federation.distillation.repository import UNFINISHED
from fedssl_coordinator.federation.runs import repository as runs
from fedssl_coordinator.federation.transitions import about, transition
from fedssl_coordinator.storage.artifacts.removal import release


class Begun(NamedTuple):
    """A job to work on. `is_resumed`: somebody has before, and ended; `is_told`: which is worth an event."""

    run: Run
    job: DistillationJob
    is_resumed: bool
    is_told: bool


def lock_name(job_id: UUID) -> str:
    """The lock that whoever works on a job holds."""
    return f"{repository.LOCK}{job_id}"


def unfinished(session: Session, run_id: UUID) -> DistillationJob | None:
    """The run's job that waits or is worked on."""
    return repository.unfinished(session, run_id)


def queue(session: Session, run: Run, round_number: int, num_epochs: int) -> None:
    """A new job. The caller holds the run's lock, and has seen that no other is unfinished."""
    job = repository.add(session, run.id, round_number, num_epochs)
    record(session, "distillation.queued", f"{num_epochs} epochs, {_when(job)}", **about(job))
    enqueue.distil(session, job.id)
    enqueue.wake_watchers(session)


def resume(session: Session, run: Run) -> None:
    """Whoever resumes a run wants its job tried now. The caller holds the run's lock."""
    if (job := repository.unfinished(session, run.id)) is not None:
        retries.start_anew(session, job)
        enqueue.distil(session, job.id)


def begin(session: Session, job_id: UUID) -> Begun | None:
    """Count a try of a job whose lock the caller holds. None: there is nothing to do for it, now or ever."""
    if (found := _locked(session, job_id)) is None:
        return None
    run, job = found
    is_resumed = job.state == JobState.RUNNING
    if job.state not in UNFINISHED or (run.state != RunState.RUNNING and not is_resumed):
        return None
    if not retries.may_begin(session, job):
        return None
    is_told = retries.is_told(job.num_tries)
    retries.begin(session, job)
    job.sent_at = None
    session.flush()
    if not is_resumed:
        transition(session, job, JobState.RUNNING, f"{_when(job)}: the training begins", started_at=func.now())
    session.refresh(job)
    return Begun(run, job, is_resumed, is_told)


def note_resumption(session: Session, job: DistillationJob, epoch: int, *, tell: bool) -> None:
    """The job goes on after this epoch (0: from the beginning), where an earlier try left it."""
    if repository.set_while_running(session, job.id, epoch=epoch) and tell:
        where = f"goes on after epoch {epoch} of {job.num_epochs}" if epoch else "begins again: nothing had been saved"
        record(session, "distillation.resumed", where, **about(job, {"epoch": epoch}))
        enqueue.wake_watchers(session)


def note_failure(session: Session, job_id: UUID, why: str) -> None:
    """A try has failed for a reason that may pass: pause, try again."""
    found = _locked(session, job_id)
    if found is not None and found[1].state in UNFINISHED:
        retries.note_failure(session, found[1], why)


def note_departure(session: Session, job_id: UUID) -> None:
    """The process that worked on the job leaves, and has saved its work: another may go on at once."""
    found = _locked(session, job_id)
    if found is not None and found[1].state == JobState.RUNNING:
        retries.start_anew(session, found[1])


def drop_checkpoint(session: Session, job_id: UUID, why: str) -> None:
    """The checkpoint is of no use: begin anew."""
    found = _locked(session, job_id)
    if found is not None and found[1].state == JobState.RUNNING:
        job = found[1]
        _let_go(session, job)
        job.checkpoint = None
        retries.note_failure(session, job, why)


def still_running(session: Session, job_id: UUID) -> tuple[Run, DistillationJob] | None:
    """The job and its run, locked; None: the job was called off."""
    found = _locked(session, job_id)
    return found if found is not None and found[1].state == JobState.RUNNING else None


def complete(session: Session, job: DistillationJob) -> None:
    """The job has done what it was for. The caller holds the run's lock."""
    loss = "" if job.loss is None else f", loss {job.loss:.4f}"
    message = f"{_when(job)}: {job.num_epochs} epochs{loss}"
    _end(session, job, JobState.COMPLETED, message, epoch=job.num_epochs, reason=None)


def fail(session: Session, job: DistillationJob, reason: str) -> None:
    """The job can never succeed. The caller holds the run's lock, and ends the run."""
    _end(session, job, JobState.FAILED, f"{_when(job)}: {printable(reason)}", reason=printable(reason))


def end_unfinished(session: Session, run: Run, reason: str) -> None:
    """The run ends, and its job with it. The caller holds the run's lock."""
    if (job := repository.unfinished(session, run.id)) is not None:
        _end(session, job, JobState.CANCELLED, f"{_when(job)}: {reason}", reason=reason)


def cancel(session: Session, job_id: UUID) -> DistillationJobView:
    """Call a job off and pause its run: resumed, it queues another for the same round. A second time it is no error."""
    if (found := _locked(session, job_id)) is None:
        raise _no_job(job_id)
    run, job = found
    if job.state == JobState.CANCELLED:
        return view(job)
    if job.state not in UNFINISHED:
        raise ProblemError("conflict", f"job {job_id} is {job.state}: only one that waits or runs can be cancelled")
    reason = f"{_when(job)}: the distillation was cancelled; resume the run to begin it anew"
    where = f"cancelled by an operator after epoch {job.epoch} of {job.num_epochs}"
    _end(session, job, JobState.CANCELLED, f"{_when(job)}: {where}", reason=where)
    if run.state == RunState.RUNNING:
        transition(session, run, RunState.PAUSED, reason, reason=reason)
    else:
        runs.set_reason(session, run, reason)
    enqueue.wake_watchers(session)
    return show(session, job_id)


def show(session: Session, job_id: UUID) -> DistillationJobView:
    """Raises ProblemError where there is no such job."""
    job = repository.get(session, job_id)
    if job is None:
        raise _no_job(job_id)
    return view(job)


def of_run(
    session: Session, run_id: UUID, limit: int, after: tuple[datetime, UUID] | None
) -> Sequence[DistillationJob]:
    """A run's jobs, oldest first."""
    return repository.oldest_first(session, run_id, limit, after)


def view(job: DistillationJob) -> DistillationJobView:
    """As the API shows it, with the time that is left by the pace so far."""
    left = None
    if job.state == JobState.RUNNING and job.seconds_per_epoch is not None:
        left = (job.num_epochs - job.epoch) * job.seconds_per_epoch
    values = {name: getattr(job, name) for name in DistillationJobView.model_fields if name != "eta_seconds"}
    return DistillationJobView(**values, eta_seconds=left)


def _locked(session: Session, job_id: UUID) -> tuple[Run, DistillationJob] | None:
    """The job and its run as they are now, which nobody else can move until the transaction ends."""
    job = repository.get(session, job_id)
    run = None if job is None else runs.locked(session, job.run_id)
    if job is None or run is None:
        return None
    session.refresh(job)  # it may have moved while the run's lock was waited for
    return run, job


def _end(session: Session, job: DistillationJob, state: JobState, message: str, **values: Any) -> None:
    _let_go(session, job)
    won = transition(session, job, state, message, checkpoint=None, retry_at=None, finished_at=func.now(), **values)
    assert won, "the run is locked, and its jobs with it"
    enqueue.wake_watchers(session)


def _let_go(session: Session, job: DistillationJob) -> None:
    """Once nothing refers to the checkpoint any more, it goes."""
    if job.checkpoint is not None:
        after_commit(session, release, job.checkpoint)


def _when(job: DistillationJob) -> str:
    return f"round {job.round_number}" if job.round_number else "before the first round"


def _no_job(job_id: UUID) -> ProblemError:
    return ProblemError(
        "not-found",
        f"no distillation job {job_id}: `GET /v1/runs/{{run_id}}/distillation-jobs` lists a run's",
    )
