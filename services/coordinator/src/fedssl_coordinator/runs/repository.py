"""Reads and writes runs."""

from collections.abc import Sequence
from datetime import datetime
from typing import Any
from uuid import UUID

from sqlalchemy import func, select, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.orm import Session

from fedssl.protocol.states import RunState
from fedssl_coordinator.models import Run


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


def prepared(session: Session, run_id: UUID, plan: dict[str, Any], state: str, broadcast: str) -> bool:
    """Keep plan and first weights. False: that had been done."""
    return _update(
        session,
        update(Run).where(Run.id == run_id, Run.plan.is_(None)),
        plan=plan,
        server_state=state,
        broadcast=broadcast,
        initial_broadcast=broadcast,
    )


def publish(session: Session, run_id: UUID, state: str, broadcast: str) -> None:
    """The new global weights, and one more round closed."""
    _update(
        session,
        update(Run).where(Run.id == run_id),
        server_state=state,
        broadcast=broadcast,
        rounds_closed=Run.rounds_closed + 1,
    )


def count_round(session: Session, run_id: UUID) -> None:
    """One more round closed, without new weights."""
    _update(session, update(Run).where(Run.id == run_id), rounds_closed=Run.rounds_closed + 1)


def set_reason(session: Session, run_id: UUID, reason: str | None) -> None:
    """Why an unfinished run does not move."""
    _update(session, update(Run).where(Run.id == run_id, Run.state != RunState.FINISHED), reason=reason)


def counts_by_state(session: Session) -> dict[str, int]:
    return dict(session.execute(select(Run.state, func.count()).group_by(Run.state)).tuples().all())


def _update(session: Session, statement: Any, **values: Any) -> bool:
    returning = statement.values(**values).returning(Run.id).execution_options(synchronize_session=False)
    found = session.execute(returning).scalar_one_or_none() is not None
    session.expire_all()
    return found
