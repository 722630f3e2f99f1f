"""Adds, shows, tests and removes destinations of notifications."""

import ipaddress
from collections.abc import Sequence
from urllib.parse import urlsplit
from uuid import UUID

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from fedssl.protocol.notifications import DeliveryState, DestinationKind, Notification, NotificationData
from fedssl.protocol.views import DeliveryView, DestinationCreate, DestinationCreated, DestinationView
from fedssl_coordinator.core import enqueue, outbox
from fedssl_coordinator.core.audit import record
from fedssl_coordinator.core.models import NotificationDelivery, NotificationDestination
from fedssl_coordinator.core.problems import ProblemError
from fedssl_coordinator.core.secrets import derived_key
from fedssl_coordinator.core.settings import settings
from fedssl_coordinator.identity.projects import service as projects
from fedssl_coordinator.notifications import repository
from fedssl_coordinator.notifications.public_network import ForbiddenAddress, check_address
from fedssl_coordinator.notifications.webhooks import secret_text

MOST_DESTINATIONS = 50
TEST = "test"


def create(session: Session, request: DestinationCreate) -> DestinationCreated:
    """Add a destination. Only the result contains a webhook's secret."""
    _require_possible(request)
    if repository.lock_destinations(session) >= MOST_DESTINATIONS:
        raise ProblemError("conflict", f"there are {MOST_DESTINATIONS} destinations: remove one first")
    row = NotificationDestination(
        project=projects.resolved(session, request.project),
        kind=request.kind,
        target=request.target,
        label=request.label,
        topics=[str(topic) for topic in request.topics],
    )
    repository.add(session, row)
    record(
        session,
        "notifications.added",
        f"{row.kind} to {shown_target(row)}: {', '.join(row.topics)}",
        data={"destination": str(row.id)},
    )
    [view] = views(session, [row])
    is_webhook = row.kind == DestinationKind.WEBHOOK
    return DestinationCreated(**view.model_dump(), secret=secret_text(key_of(session, row)) if is_webhook else None)


def key_of(session: Session, destination: NotificationDestination) -> bytes:
    """Return the key that signs what is sent to a webhook. It is derived, so no row, answer or log contains it."""
    return derived_key(session, f"fedssl/webhook/{destination.id}")


def require(session: Session, destination_id: UUID) -> NotificationDestination:
    """Return a destination. Raises ProblemError if it does not exist."""
    if (row := repository.get(session, destination_id)) is None:
        raise ProblemError("not-found", f"no notification destination {destination_id}: `fedssl notify ls` lists them")
    return row


def views(session: Session, rows: Sequence[NotificationDestination]) -> list[DestinationView]:
    """Return what the API shows of destinations."""
    ids = [row.id for row in rows]
    newest, pending = repository.newest_tried(session, ids), repository.count_pending(session, ids)
    return [
        DestinationView(
            id=row.id,
            project=row.project,
            kind=DestinationKind(row.kind),
            target=shown_target(row),
            topics=row.topics,
            label=row.label,
            created_at=row.created_at,
            last_delivery=delivery_view(newest[row.id]) if row.id in newest else None,
            num_pending=pending.get(row.id, 0),
        )
        for row in rows
    ]


def delivery_view(row: NotificationDelivery) -> DeliveryView:
    is_pending = row.state == DeliveryState.PENDING
    return DeliveryView(
        id=row.id,
        topic=row.topic,
        message=row.payload["data"]["message"],
        state=DeliveryState(row.state),
        num_tries=row.num_tries,
        next_try_at=row.next_try_at if is_pending else None,
        error=row.error,
        created_at=row.created_at,
        ended_at=row.ended_at,
    )


def remove(session: Session, destination_id: UUID) -> None:
    """Remove a destination. Notifications that wait for it are not delivered."""
    row = require(session, destination_id)
    what = f"{row.kind} to {shown_target(row)}"
    repository.remove(session, destination_id)
    record(session, "notifications.removed", what, data={"destination": str(destination_id)})


def send_test(session: Session, destination_id: UUID) -> DeliveryView:
    """Queue a test notification, and return its delivery. Raises ProblemError while too many wait already."""
    row = require(session, destination_id)
    if repository.count_pending(session, [row.id]).get(row.id, 0) >= outbox.MOST_PENDING:
        raise ProblemError("conflict", f"{outbox.MOST_PENDING} notifications wait for this destination already")
    now = session.scalars(select(func.now())).one()
    data = NotificationData(kind=TEST, message="This is a test: notifications arrive here.")
    values = outbox.delivery(row, TEST, Notification(type=TEST, timestamp=now, data=data))
    enqueue.notify(session)
    return delivery_view(repository.add_delivery(session, values))


def shown_target(row: NotificationDestination) -> str:
    """Return an address for people, and only the host of a URL, because many services put a secret into the path."""
    if row.kind == DestinationKind.EMAIL:
        return row.target
    parts = urlsplit(row.target)
    return f"{parts.scheme}://{parts.netloc}/{'...' if parts.path.strip('/') or parts.query else ''}"


def _require_possible(request: DestinationCreate) -> None:
    """Raise ProblemError for what can never be delivered with the coordinator's settings."""
    if request.kind is DestinationKind.EMAIL:
        if settings().smtp_host is None:
            detail = "the coordinator has no SMTP server: set FEDSSL_SMTP_HOST and FEDSSL_SMTP_FROM"
            raise ProblemError("conflict", detail)
        return
    parts = urlsplit(request.target)
    if parts.scheme == "http" and not settings().notify_allow_http:
        raise ProblemError("conflict", "http URLs are not allowed: use https, or set FEDSSL_NOTIFY_ALLOW_HTTP=true")
    host = parts.hostname or ""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return  # a name, which is resolved and checked at each delivery
    try:
        check_address(host, host, settings().allowed_networks())
    except ForbiddenAddress as error:
        raise ProblemError("conflict", str(error)) from None
