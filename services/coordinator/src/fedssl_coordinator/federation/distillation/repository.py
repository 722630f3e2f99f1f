"""Reads and writes distillation jobs."""

from collections.abc import Sequence
from datetime import datetime
from typing import Any
from uuid import UUID

from sqlalchemy import Text, cast, func, literal, select, update
from sqlalchemy.orm import Session

from fedssl.protocol.states import JobState, RunState
from fedssl_coordinator.core.db import is_held
from fedssl_coordinator.core.models import DistillationJob, Run
from fedssl_coordinator.federation.retries import due, take_untold

LOCK = "distillation/"  # and the job's id: what the process that works on a job holds
UNFINISHED = (JobState.QUEUED, JobState.RUNNING)


def get(session: Session, job_id: UUID) -> DistillationJob | None:
    """The job as it is now."""
    return session.get(DistillationJob, job_id, populate_existing=True)


def unfinished(session: Session, run_id: UUID) -> DistillationJob | None:
    """The run's job that waits or is worked on: a unique index makes it one at most."""
    statement = select(DistillationJob).where(DistillationJob.run_id == run_id, DistillationJob.state.in_(UNFINISHED))
    return session.scalars(statement.execution_options(populate_existing=True)).one_or_none()


def oldest_first(
    session: Session, run_id: UUID, limit: int, after: tuple[datetime, UUID] | None
) -> Sequence[DistillationJob]:
    job = DistillationJob
    statement = select(job).where(job.run_id == run_id).order_by(job.created_at, job.id).limit(limit)
    if after is not None:
        at, job_id = after
        statement = statement.where((job.created_at > at) | ((job.created_at == at) & (job.id > job_id)))
    return session.scalars(statement).all()


def add(session: Session, run_id: UUID, round_number: int, num_epochs: int) -> DistillationJob:
    job = DistillationJob(
        run_id=run_id, round_number=round_number, state=JobState.QUEUED, num_epochs=num_epochs, sent_at=func.now()
    )
    session.add(job)
    session.flush()
    return job


def take_waiting(session: Session, num_messages: int) -> Sequence[UUID]:
    """Jobs that nobody works on although somebody could, noted as sent: the query behind the sweep.

    Not those whose last try has failed just now, nor those whose message waits among `num_messages` in the queue. A
    paused run's job is in it only if it was begun.
    """
    is_begun = DistillationJob.state == JobState.RUNNING
    may_go_on = (Run.state == RunState.RUNNING) | ((Run.state == RunState.PAUSED) & is_begun)
    waits = (
        DistillationJob.state.in_(UNFINISHED)
        & due(DistillationJob)
        & select(Run.id).where(Run.id == DistillationJob.run_id, may_go_on).exists()
        & ~is_held(literal(LOCK) + cast(DistillationJob.id, Text))
    )
    return take_untold(session, DistillationJob, waits, num_messages)


def set_while_running(session: Session, job_id: UUID, **values: Any) -> bool:
    """Write where a job stands. False: it was called off, and nothing is written."""
    statement = (
        update(DistillationJob)
        .where(DistillationJob.id == job_id, DistillationJob.state == JobState.RUNNING)
        .values(**values, updated_at=func.now())
        .returning(DistillationJob.id)
        .execution_options(synchronize_session=False)
    )
    return session.execute(statement).scalar_one_or_none() is not None
