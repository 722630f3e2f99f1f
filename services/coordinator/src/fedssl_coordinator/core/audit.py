"""Reads and writes the audit log."""

from collections.abc import Callable, Sequence
from typing import Any
from uuid import UUID

from sqlalchemy import event, select, text
from sqlalchemy.orm import Session

from fedssl_coordinator.core.models import Event
from fedssl_coordinator.core.problems import printable

RUN_DELETED, HAD_UPDATES = "run.deleted", "had_updates"  # an event that is read again: workers learn of it too
_PENDING, _AFTERWARDS = "events", "after_events"


def record(
    session: Session,
    kind: str,
    message: str,
    *,
    run_id: UUID | None = None,
    round_number: int | None = None,
    client_id: str | None = None,
    data: dict[str, Any] | None = None,
) -> None:
    """Append an event in this transaction. It is written at the commit, in the order of the calls."""
    row = Event(
        kind=kind,
        message=printable(message),
        run_id=run_id,
        round_number=round_number,
        client_id=client_id,
        data=data or {},
    )
    session.info.setdefault(_PENDING, []).append(row)


def once_written(session: Session, action: Callable[[Session], None]) -> None:
    """Call `action` as the last thing in this transaction, its events written.

    Whoever wrote about the same run before has committed by then, and who writes after waits: `action` sees all that
    they did, and of several transactions at once the last sees them all.
    """
    session.info.setdefault(_AFTERWARDS, []).append(action)


@event.listens_for(Session, "before_commit")
def _write(session: Session) -> None:
    rows: list[Event] = session.info.pop(_PENDING, [])
    # Identity values are drawn before the commit: without the lock a reader that has seen event 8 could miss a
    # slower transaction's event 7 for ever. Taken last, it can be part of no deadlock.
    for run_id in sorted({str(row.run_id) for row in rows}):
        session.execute(text("SELECT pg_advisory_xact_lock(hashtextextended(:key, 0))"), {"key": f"events/{run_id}"})
    session.add_all(rows)
    session.flush()
    for action in session.info.pop(_AFTERWARDS, []):
        action(session)


@event.listens_for(Session, "after_rollback")
def _drop(session: Session) -> None:
    session.info.pop(_PENDING, None)
    session.info.pop(_AFTERWARDS, None)


def after(session: Session, run_id: UUID, last_id: int, limit: int, kind: str | None = None) -> Sequence[Event]:
    """A run's events with an id above `last_id`, oldest first; only those of one kind where that is given."""
    statement = select(Event).where(Event.run_id == run_id, Event.id > last_id).order_by(Event.id).limit(limit)
    if kind is not None:
        statement = statement.where(Event.kind == kind)
    return session.scalars(statement).all()


def deleted_runs(session: Session, run_ids: Sequence[UUID]) -> Sequence[UUID]:
    """Those of the runs that were deleted and whose clients had sent something."""
    had_updates = Event.data[HAD_UPDATES].as_boolean()
    told = select(Event.run_id).where(Event.run_id.in_(run_ids), Event.kind == RUN_DELETED, had_updates)
    return [run_id for run_id in session.scalars(told) if run_id is not None]


def clients_told_of(session: Session, run_id: UUID, kind: str) -> set[str]:
    """The clients about whom the run's log has an event of this kind."""
    found = session.scalars(select(Event.client_id).where(Event.run_id == run_id, Event.kind == kind).distinct())
    return {client_id for client_id in found if client_id is not None}
