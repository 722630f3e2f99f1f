"""Reads and writes runs."""

from collections.abc import Sequence
from datetime import datetime
from typing import Any
from uuid import UUID

from sqlalchemy import ColumnElement, delete, select
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.orm import Session

from fedssl.protocol.states import RoundState, RunState
from fedssl_coordinator.core.models import (
    Assignment,
    DimensionAssignment,
    DistillationJob,
    Evaluation,
    Metric,
    PartialUpload,
    Round,
    Run,
    Upload,
)


def get(session: Session, run_id: UUID) -> Run | None:
    return session.get(Run, run_id)


def get_one(session: Session, run_id: UUID) -> Run:
    return session.get_one(Run, run_id)


def by_idempotency_key(session: Session, key: str) -> Run | None:
    return session.scalars(select(Run).where(Run.idempotency_key == key)).one_or_none()


def add(session: Session, **values: Any) -> Run | None:
    """None: a run with this idempotency key is there already."""
    statement = insert(Run).values(**values).on_conflict_do_nothing(index_elements=["idempotency_key"]).returning(Run)
    return session.scalars(statement).one_or_none()


def newest_first(
    session: Session, limit: int, before: tuple[datetime, UUID] | None, state: RunState | None
) -> Sequence[Run]:
    statement = select(Run).order_by(Run.created_at.desc(), Run.id.desc()).limit(limit)
    if state is not None:
        statement = statement.where(Run.state == state)
    if before is not None:
        at, run_id = before
        statement = statement.where((Run.created_at < at) | ((Run.created_at == at) & (Run.id < run_id)))
    return session.scalars(statement).all()


def locked(session: Session, run_id: UUID) -> Run | None:
    """The run as it is now, which nobody else can move until the transaction ends.

    Whoever changes a run or one of its rounds takes this lock first.
    """
    return session.get(Run, run_id, with_for_update={"key_share": True}, populate_existing=True)


def awaiting_clients(session: Session, num_eligible: ColumnElement[int]) -> Sequence[UUID]:
    """Running runs without a round in progress, for which there are clients enough: one more may be what they wait for.

    Those that need more clients than there are would only be looked at in vain, by every one that registers.
    """
    in_progress = select(Round.id).where(Round.run_id == Run.id, Round.state != RoundState.CLOSED)
    fewest = Run.spec["cohort"]["min_clients"].as_integer()
    statement = select(Run.id).where(Run.state == RunState.RUNNING, ~in_progress.exists(), fewest <= num_eligible)
    return session.scalars(statement).all()


def set_first_weights(session: Session, run: Run, plan: dict[str, Any], state: str, broadcast: str) -> None:
    """The plan, and the weights that it starts from."""
    run.plan = plan
    run.initial_broadcast = broadcast
    _set_weights(session, run, state, broadcast)


def set_next_weights(session: Session, run: Run, state: str, broadcast: str) -> None:
    """The new global weights, and one more round closed."""
    run.rounds_closed += 1
    _set_weights(session, run, state, broadcast)


def count_round(session: Session, run: Run) -> None:
    """One more round closed, without new weights."""
    run.rounds_closed += 1
    session.flush()


def set_reason(session: Session, run: Run, reason: str | None) -> None:
    """Why an unfinished run does not move."""
    run.reason = reason
    session.flush()


def delete_all(session: Session, run_id: UUID) -> None:
    """The run, and every row that is about it but its events."""
    of_rounds = select(Assignment.id).where(Assignment.run_id == run_id)
    for uploads in (Upload, PartialUpload):
        session.execute(delete(uploads).where(uploads.assignment_id.in_(of_rounds)))
    # Evaluations before metrics: one that completes at this moment is waited for, and has written metrics by then.
    for table in (Evaluation, Metric, DistillationJob, DimensionAssignment, Assignment, Round):
        session.execute(delete(table).where(table.run_id == run_id))
    session.execute(delete(Run).where(Run.id == run_id))


def _set_weights(session: Session, run: Run, state: str, broadcast: str) -> None:
    run.server_state, run.broadcast = state, broadcast
    run.num_tries, run.retry_at, run.reason = 0, None, None
    session.flush()
