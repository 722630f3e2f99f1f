"""Reads and writes distillation jobs."""

from collections.abc import Sequence
from datetime import datetime
from typing import Any
from uuid import UUID

from sqlalchemy import bindparam, func, select, tuple_
from sqlalchemy.orm import Session

from fedssl.protocol.states import JobState, RunState
from fedssl_coordinator.core.models import DistillationJob, Run
from fedssl_coordinator.federation.jobs import repository as jobs
from fedssl_coordinator.federation.retries import MOST_DEATHS

_UNFINISHED = (
    select(DistillationJob)
    .where(DistillationJob.run_id == bindparam("run"), DistillationJob.state.in_(jobs.UNFINISHED))
    .execution_options(populate_existing=True)
)


def unfinished(session: Session, run_id: UUID) -> DistillationJob | None:
    """Return the run's queued or running job. A unique index allows at most one."""
    return session.scalars(_UNFINISHED, {"run": run_id}).one_or_none()


def oldest_first(
    session: Session, run_id: UUID, limit: int, after: tuple[datetime, UUID] | None
) -> Sequence[DistillationJob]:
    job = DistillationJob
    statement = select(job).where(job.run_id == run_id).order_by(job.created_at, job.id).limit(limit)
    if after is not None:
        statement = statement.where(tuple_(job.created_at, job.id) > after)
    return session.scalars(statement).all()


def add(session: Session, run_id: UUID, round_number: int, num_epochs: int) -> DistillationJob:
    job = DistillationJob(
        run_id=run_id, round_number=round_number, state=JobState.QUEUED, num_epochs=num_epochs, sent_at=func.now()
    )
    session.add(job)
    session.flush()
    return job


def select_due_notifications(session: Session, num_messages: int) -> Sequence[UUID]:
    """Select jobs as `jobs.select_due_notifications` does; of a paused run, only a job that was begun and is not in
    quarantine."""
    is_begun = (DistillationJob.state == JobState.RUNNING) & (DistillationJob.num_deaths < MOST_DEATHS)
    may_continue = (Run.state == RunState.RUNNING) | ((Run.state == RunState.PAUSED) & is_begun)
    of_active_run = select(Run.id).where(Run.id == DistillationJob.run_id, may_continue).exists()
    return jobs.select_due_notifications(session, DistillationJob, num_messages, of_active_run)


def set_while_running(session: Session, job_id: UUID, **values: Any) -> bool:
    """Write the progress of a running job. Returns False, and writes nothing, if the job no longer runs."""
    return jobs.set_while_running(session, DistillationJob, job_id, **values, updated_at=func.now())
