"""Reads and writes the rows of jobs, whether they are distillation jobs or evaluations."""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, TypeVar
from uuid import UUID

from sqlalchemy import ColumnElement, Text, and_, cast, func, literal, select, update
from sqlalchemy.orm import Session

from fedssl.protocol.states import JobState
from fedssl_coordinator.core.db import among, is_held
from fedssl_coordinator.core.models import Evaluation, Job
from fedssl_coordinator.federation import run_rows
from fedssl_coordinator.federation.retries import due

J = TypeVar("J", bound=Job)

UNFINISHED = (JobState.QUEUED, JobState.RUNNING)
_RESEND_SECONDS = 10


def lock_name(table: type[Job], job_id: UUID) -> str:
    """Return the name of the lock that a process holds while it works on a job."""
    return f"{table.kind}/{job_id}"


def get(session: Session, table: type[J], job_id: UUID) -> J | None:
    """Return the job as it is now."""
    return session.get(table, job_id, populate_existing=True)


def locked(session: Session, table: type[J], job_id: UUID) -> J | None:
    """Return the job as it is now. No other transaction can change its state before this one ends.

    An evaluation is locked by its own row: rounds never wait for one. A distillation job is locked by its run's row,
    like the run's rounds.
    """
    if table is Evaluation:
        return session.get(table, job_id, with_for_update={"key_share": True}, populate_existing=True)
    job = get(session, table, job_id)
    if job is None or run_rows.locked(session, job.run_id) is None:
        return None
    session.refresh(job)  # its state may have changed while this transaction waited for the run's lock
    return job


def select_due_notifications(
    session: Session, table: type[Job], num_messages: int, *conditions: ColumnElement[bool]
) -> Sequence[UUID]:
    """Select the waiting jobs that are due for another notification, and record that they were notified.

    A job waits if it is unfinished, meets the conditions, does not pause after a failure, and no process works on it.
    It is due once, and again if the queue holds fewer messages (`num_messages`) than jobs wait: some were lost. A job
    whose message stays in the queue for hours, behind others or because no process serves it, is not sent again.
    """
    lock = literal(f"{table.kind}/") + cast(table.id, Text)
    waits = and_(table.state.in_(UNFINISHED), due(table), ~is_held(lock), *conditions)
    just_now = timedelta(seconds=_RESEND_SECONDS)
    is_new = table.sent_at.is_(None)
    was_sent_before = ~table.sent_at.between(func.now() - just_now, func.now() + just_now)
    waiting = session.execute(select(table.id, is_new, was_sent_before).where(waits)).all()
    are_lost = num_messages < len(waiting)
    ids = [job_id for job_id, never, before in waiting if never or (are_lost and before)]
    if ids:  # usually there are none, and this runs every few seconds
        statement = update(table).where(among(table.id, ids)).values(sent_at=func.now())
        session.execute(statement, execution_options={"synchronize_session": False})
    return ids


def set_while_running(session: Session, table: type[Job], job_id: UUID, **values: Any) -> bool:
    """Write values of a running job. Returns False, and writes nothing, if the job no longer runs."""
    statement = (
        update(table)
        .where(table.id == job_id, table.state == JobState.RUNNING)
        .values(**values)
        .returning(table.id)
        .execution_options(synchronize_session=False)
    )
    return session.execute(statement).scalar_one_or_none() is not None
