"""The outbox: deliveries of notifications, written in the transaction of the events that they are about."""

from collections.abc import Sequence
from typing import Any

from sqlalchemy import ColumnElement, func, select
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.orm import Session

from fedssl.protocol.notifications import DeliveryState, Notification, NotificationData, Topic
from fedssl.protocol.states import Outcome
from fedssl_coordinator.core import enqueue
from fedssl_coordinator.core.models import Client, Event, NotificationDelivery, NotificationDestination, Run
from fedssl_coordinator.core.problems import printable
from fedssl_coordinator.core.project_scope import UNRESTRICTED

UNATTENDED, UNSEEN = "run.unattended", "run.unseen"
MESSAGE_CHARACTERS = 500
MOST_PENDING = 1000
"""The most deliveries that wait for a destination, if it does not answer. No further ones are added."""

_FINISHED, _PAUSED = "run.finished", "run.paused"
_TOPICS = {
    "evaluation.failed": Topic.FAILED,
    "distillation.failed": Topic.FAILED,
    "run.stalled": Topic.STALLED,
    "run.waiting": Topic.STALLED,
    UNATTENDED: Topic.STALLED,
    UNSEEN: Topic.STALLED,
    "distillation.stalled": Topic.STALLED,
    "evaluation.stalled": Topic.STALLED,
    "assignment.declined": Topic.DECLINED,
    "run.alarm": Topic.ALARM,
    "update.unusual": Topic.ALARM,
    "artifact.damaged": Topic.ALARM,
    "ledger.went_back": Topic.ALARM,
    "ledger.forked": Topic.ALARM,
    "ledger.replaced": Topic.ALARM,
}
# Every client of a round may cause one: only the first is a notification; the event log has the others.
_ONCE_PER_ROUND = ("assignment.declined", "update.unusual")


def add(session: Session, events: Sequence[Event]) -> None:
    """Add a delivery for each of these stored events, and each destination that wants it."""
    found = [
        (event, topic, run)
        for event in events
        if event.kind in (*_TOPICS, _FINISHED, _PAUSED) and (topic := _topic(event, run := _run(session, event)))
    ]
    if not found:  # as for most events: building the query would take longer than writing them
        return
    # Locked, so that no destination is removed before its deliveries are written. One that is being removed is left
    # out: its removal may wait for this transaction's events.
    staying = select(NotificationDestination).where(_has_room())
    staying = staying.with_for_update(read=True, key_share=True, skip_locked=True)
    destinations = session.scalars(staying.execution_options(**{UNRESTRICTED: True})).all()
    rows = [
        delivery(destination, topic, _payload(event, topic, run), _once_per(event))
        for event, topic, run in found
        for destination in destinations
        if topic in destination.topics and destination.project in (None, _project(session, event, run))
    ]
    if rows:
        session.execute(insert(NotificationDelivery).values(rows).on_conflict_do_nothing())
        enqueue.notify(session)


def delivery(
    destination: NotificationDestination, topic: str, payload: Notification, once_per: str | None = None
) -> dict[str, Any]:
    """Return the values of a delivery's row."""
    return {
        "destination_id": destination.id,
        "topic": topic,
        "payload": payload.model_dump(mode="json", exclude_none=True),
        "once_per": once_per,
        "state": DeliveryState.PENDING,
    }


def _run(session: Session, event: Event) -> Run | None:
    """Return the run that an event is about, of any project: a damaged file may be another project's too."""
    unrestricted = {UNRESTRICTED: True}
    return session.get(Run, event.run_id, execution_options=unrestricted) if event.run_id else None


def _project(session: Session, event: Event, run: Run | None) -> str | None:
    """Return the project that an event is about."""
    if run is not None:
        return run.project
    client = None if event.client_id is None else session.get(Client, event.client_id)
    return None if client is None else client.project


def _has_room() -> ColumnElement[bool]:
    pending = select(func.count()).where(
        NotificationDelivery.destination_id == NotificationDestination.id,
        NotificationDelivery.state == DeliveryState.PENDING,
    )
    return pending.scalar_subquery() < MOST_PENDING


def _topic(event: Event, run: Run | None) -> Topic | None:
    if event.kind == _FINISHED:
        return Topic.FAILED if event.data.get("outcome") == Outcome.FAILED else Topic.FINISHED
    if event.kind == _PAUSED:  # an operator who pauses a run gives no reason
        return Topic.STALLED if run is not None and run.reason else None
    return _TOPICS[event.kind]


def _payload(event: Event, topic: Topic, run: Run | None) -> Notification:
    """Return the notification of an event. The event's `data` is not part of it."""
    data = NotificationData(
        event=event.id,
        kind=event.kind,
        run=event.run_id,
        run_name=None if run is None else run.name,
        round=event.round_number,
        client=event.client_id,
        outcome=event.data.get("outcome") if event.kind == _FINISHED else None,
        message=printable(event.message, MESSAGE_CHARACTERS),
    )
    return Notification(type=topic, timestamp=event.at, data=data)


def _once_per(event: Event) -> str | None:
    return f"{event.kind}/{event.run_id}/{event.round_number}" if event.kind in _ONCE_PER_ROUND else None
