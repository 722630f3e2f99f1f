"""Reads and writes destinations of notifications, and their deliveries."""

from collections.abc import Collection, Iterable, Sequence
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

from sqlalchemy import delete, func, or_, select, tuple_, update
from sqlalchemy.dialects.postgresql import distinct_on, insert
from sqlalchemy.orm import Session

from fedssl.backoff import delay_seconds
from fedssl.protocol.notifications import DeliveryState
from fedssl_coordinator.core.db import from_now
from fedssl_coordinator.core.models import Event, NotificationDelivery, NotificationDestination, Run

MOST_TRIES = 14
LONGEST_PAUSE_SECONDS = 4 * 60 * 60.0
KEPT = timedelta(days=30)
"""How long a delivery that has ended is kept."""

Before = tuple[datetime, UUID]


def pause_seconds(num_tries: int) -> float:
    """Return how long to wait after this many tries: all of them together take half a day.

    >>> [pause_seconds(tries) for tries in (1, 2, 3, 14)]
    [10.0, 20.0, 40.0, 14400.0]
    >>> round(sum(map(pause_seconds, range(1, MOST_TRIES))) / 3600, 1)
    13.7
    """
    return delay_seconds(num_tries, 10.0, LONGEST_PAUSE_SECONDS)


def lock_destinations(session: Session) -> int:
    """Prevent other transactions from adding a destination until this one ends, and return how many there are."""
    session.execute(select(func.pg_advisory_xact_lock(func.hashtextextended("notification_destinations", 0))))
    return session.scalar(select(func.count()).select_from(NotificationDestination)) or 0


def add(session: Session, destination: NotificationDestination) -> None:
    session.add(destination)
    session.flush()
    session.refresh(destination)  # the database's clock has set its time


def get(session: Session, destination_id: UUID) -> NotificationDestination | None:
    return session.get(NotificationDestination, destination_id)


def remove(session: Session, destination_id: UUID) -> bool:
    """Remove a destination with its deliveries, or return False if it does not exist."""
    statement = delete(NotificationDestination).where(NotificationDestination.id == destination_id)
    return session.execute(statement.returning(NotificationDestination.id)).scalar_one_or_none() is not None


def oldest_first(session: Session, limit: int, after: Before | None) -> Sequence[NotificationDestination]:
    table = NotificationDestination
    statement = select(table).order_by(table.created_at, table.id).limit(limit)
    if after is not None:
        statement = statement.where(tuple_(table.created_at, table.id) > after)
    return session.scalars(statement).all()


def newest_tried(session: Session, destination_ids: Iterable[UUID]) -> dict[UUID, NotificationDelivery]:
    """Return each destination's newest delivery that was attempted."""
    table = NotificationDelivery
    statement = (
        select(table)
        .where(table.destination_id.in_(list(destination_ids)), table.num_tries > 0)
        .ext(distinct_on(table.destination_id))
        .order_by(table.destination_id, table.created_at.desc(), table.id.desc())
    )
    return {row.destination_id: row for row in session.scalars(statement)}


def count_pending(session: Session, destination_ids: Iterable[UUID]) -> dict[UUID, int]:
    table = NotificationDelivery
    statement = (
        select(table.destination_id, func.count())
        .where(table.destination_id.in_(list(destination_ids)), table.state == DeliveryState.PENDING)
        .group_by(table.destination_id)
    )
    return {row[0]: row[1] for row in session.execute(statement)}


def add_delivery(session: Session, values: dict[str, Any]) -> NotificationDelivery:
    return session.scalars(insert(NotificationDelivery).values(values).returning(NotificationDelivery)).one()


def deliveries(
    session: Session, destination_id: UUID, limit: int, before: Before | None
) -> Sequence[NotificationDelivery]:
    """Return a destination's deliveries, newest first."""
    table = NotificationDelivery
    statement = (
        select(table)
        .where(table.destination_id == destination_id)
        .order_by(table.created_at.desc(), table.id.desc())
        .limit(limit)
    )
    if before is not None:
        statement = statement.where(tuple_(table.created_at, table.id) < before)
    return session.scalars(statement).all()


def claim(session: Session, without: Collection[UUID]) -> tuple[NotificationDelivery, NotificationDestination] | None:
    """Return a delivery that is due, with its destination, or None. Leaves out the destinations `without`.

    The attempt is counted, and the next one scheduled, before it is made: if this process dies, another repeats it.
    """
    table = NotificationDelivery
    longest = from_now(LONGEST_PAUSE_SECONDS)  # if it is further ahead, the clock was set back
    statement = (
        select(table)
        .where(table.state == DeliveryState.PENDING, or_(table.next_try_at <= func.now(), table.next_try_at > longest))
        .where(table.destination_id.not_in(list(without)))
        .order_by(table.next_try_at, table.created_at, table.id)
        .limit(1)
        .with_for_update(skip_locked=True)
    )
    row = session.scalars(statement).one_or_none()
    if row is None:
        return None
    row.num_tries += 1
    row.next_try_at = from_now(pause_seconds(row.num_tries))
    session.flush()
    session.refresh(row)
    return row, session.get_one(NotificationDestination, row.destination_id)


def record_try(session: Session, delivery: NotificationDelivery, error: str | None) -> None:
    """Record how an attempt has ended. After the last one, the delivery has failed.

    After a failure, what else is due for the destination waits a moment, so that its backlog does not delay others.
    """
    values: dict[str, Any] = {"error": error}
    if error is None or delivery.num_tries >= MOST_TRIES:
        state = DeliveryState.DELIVERED if error is None else DeliveryState.FAILED
        values |= {"state": state, "ended_at": func.now()}
    table = NotificationDelivery
    session.execute(update(table).where(table.id == delivery.id, table.state == DeliveryState.PENDING).values(**values))
    if error is not None:
        later = from_now(pause_seconds(1))
        is_due = (table.state == DeliveryState.PENDING, table.next_try_at < later)
        others = select(table.id).where(
            table.destination_id == delivery.destination_id, table.id != delivery.id, *is_due
        )
        waiting = table.id.in_(others.with_for_update(skip_locked=True))
        session.execute(
            update(table).where(waiting).values(next_try_at=later), execution_options={"synchronize_session": False}
        )


def remove_old(session: Session) -> None:
    """Remove deliveries that have ended long ago."""
    session.execute(delete(NotificationDelivery).where(NotificationDelivery.ended_at < func.now() - KEPT))


def is_reported(session: Session, run: Run, kind: str, others: Collection[str]) -> bool:
    """Return whether the run has an event of this kind after the newest one that is not among `others` either."""
    newest = select(func.max(Event.id)).where(Event.run_id == run.id, Event.kind.not_in([kind, *others]))
    later = Event.id > func.coalesce(newest.scalar_subquery(), 0)
    found = select(Event.id).where(Event.run_id == run.id, Event.kind == kind, later)
    return session.scalar(select(found.exists())) or False
