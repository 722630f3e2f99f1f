"""The states of a job, whether it is a distillation job or an evaluation.

A job's state changes only under the lock that `repository.locked` takes. The progress of a running job is written by
the one process that works on it, which holds the lock `repository.lock_name` in the meantime.
"""

from typing import Any, Generic, NamedTuple
from uuid import UUID

from sqlalchemy import func
from sqlalchemy.orm import Session

from fedssl.protocol.states import JobState
from fedssl_coordinator.core import enqueue
from fedssl_coordinator.core.models import Job, Run
from fedssl_coordinator.core.problems import ProblemError
from fedssl_coordinator.federation import retries, run_rows
from fedssl_coordinator.federation.jobs import repository
from fedssl_coordinator.federation.jobs.repository import UNFINISHED, J
from fedssl_coordinator.federation.transitions import transition


class StartedJob(NamedTuple, Generic[J]):
    """A job to work on. `is_resumed`: an earlier attempt ended before it was done; `is_reported`: that is an event."""

    run: Run
    job: J
    is_resumed: bool
    is_reported: bool


def get(session: Session, table: type[J], job_id: UUID) -> J:
    """Return the job as it is now. Raises ProblemError if it does not exist."""
    return _found(table, job_id, repository.get(session, table, job_id))


def locked(session: Session, table: type[J], job_id: UUID) -> J:
    """Return the job as it is now, locked until the transaction ends. Raises ProblemError if it does not exist."""
    return _found(table, job_id, repository.locked(session, table, job_id))


def running(session: Session, table: type[J], job_id: UUID) -> J | None:
    """Return the job, locked until the transaction ends, or None if it is no longer running."""
    job = repository.locked(session, table, job_id)
    return job if job is not None and job.state == JobState.RUNNING else None


def begin(session: Session, job: J, message: str) -> StartedJob[J] | None:
    """Count an attempt at a locked job before it begins. Returns None if the job is finished or still pauses."""
    if job.state not in UNFINISHED or not retries.may_begin(session, job):
        return None
    is_resumed, is_reported = job.state == JobState.RUNNING, retries.is_reported(job.num_tries)
    retries.begin(session, job)
    job.sent_at = None
    session.flush()
    if not is_resumed:
        transition(session, job, JobState.RUNNING, message, started_at=func.now())
    session.refresh(job)
    return StartedJob(run_rows.get_one(session, job.run_id), job, is_resumed, is_reported)


def record_failure(session: Session, table: type[Job], job_id: UUID, why: str) -> None:
    """Pause a job that has failed for a temporary reason, and retry it afterwards."""
    job = repository.locked(session, table, job_id)
    if job is not None and job.state in UNFINISHED:
        retries.record_failure(session, job, why)


def record_departure(session: Session, table: type[Job], job_id: UUID) -> None:
    """Allow another process to resume the job at once: the process that worked on it ends, and has saved its work."""
    if (job := running(session, table, job_id)) is not None:
        retries.reset(session, job)


def is_cancelled(job: Job) -> bool:
    """Return whether a job was cancelled before. Raises ProblemError if it cannot be cancelled any more."""
    if job.state not in (*UNFINISHED, JobState.CANCELLED):
        detail = f"{_name(type(job))} {job.id} is {job.state}: only a queued or running one can be cancelled"
        raise ProblemError("conflict", detail)
    return job.state == JobState.CANCELLED


def end(
    session: Session, job: Job, state: JobState, message: str, data: dict[str, Any] | None = None, **values: Any
) -> None:
    """End a locked job."""
    won = transition(session, job, state, message, data=data, retry_at=None, finished_at=func.now(), **values)
    assert won, "the job is locked"
    enqueue.wake_watchers(session)


def _found(table: type[J], job_id: UUID, job: J | None) -> J:
    if job is None:
        path = f"/v1/runs/{{run_id}}/{table.__tablename__.replace('_', '-')}"
        raise ProblemError("not-found", f"no {_name(table)} {job_id}: `GET {path}` lists those of a run")
    return job


def _name(table: type[J]) -> str:
    """Return the job's name in errors: "distillation job" or "evaluation"."""
    return table.__tablename__.removesuffix("s").replace("_", " ")
