"""`/v1/notification-destinations`: the destinations of notifications, by webhook or e-mail."""

from datetime import datetime
from uuid import UUID

from fastapi import APIRouter, status

from fedssl.protocol.views import DeliveryView, DestinationCreate, DestinationCreated, DestinationView, Page
from fedssl_coordinator.core.db import DB
from fedssl_coordinator.core.openapi import problems
from fedssl_coordinator.core.paging import Cursor, Limit, decode_cursor, page_of
from fedssl_coordinator.identity.authentication import Admin
from fedssl_coordinator.notifications import repository, service

router = APIRouter(prefix="/v1/notification-destinations", tags=["notifications"])


@router.post("", status_code=status.HTTP_201_CREATED, responses=problems(404, 409))
def create_notification_destination(request: DestinationCreate, caller: Admin, session: DB) -> DestinationCreated:
    """Add a destination of notifications. The secret that signs a webhook is only in this response."""
    return service.create(session, request)


@router.get("")
def list_notification_destinations(
    caller: Admin, session: DB, limit: Limit = 100, cursor: Cursor = None
) -> Page[DestinationView]:
    """List the destinations, oldest first, each with the newest delivery that was attempted."""
    after = decode_cursor(cursor, datetime.fromisoformat, UUID) if cursor else None
    rows = repository.oldest_first(session, limit + 1, after)
    found = {view.id: view for view in service.views(session, rows)}
    return page_of(rows, limit, lambda row: found[row.id], lambda row: (row.created_at.isoformat(), str(row.id)))


@router.delete("/{destination_id}", status_code=status.HTTP_204_NO_CONTENT)
def remove_notification_destination(destination_id: UUID, caller: Admin, session: DB) -> None:
    """Remove a destination. Notifications that wait for it are not delivered."""
    service.remove(session, destination_id)


@router.post("/{destination_id}/test", status_code=status.HTTP_202_ACCEPTED, responses=problems(409))
def test_notification_destination(destination_id: UUID, caller: Admin, session: DB) -> DeliveryView:
    """Send a test notification. `GET .../deliveries` shows its result."""
    return service.send_test(session, destination_id)


@router.get("/{destination_id}/deliveries")
def list_notification_deliveries(
    destination_id: UUID, caller: Admin, session: DB, limit: Limit = 100, cursor: Cursor = None
) -> Page[DeliveryView]:
    """List the deliveries to a destination, newest first. Those that have ended are kept for 30 days."""
    service.require(session, destination_id)
    before = decode_cursor(cursor, datetime.fromisoformat, UUID) if cursor else None
    rows = repository.deliveries(session, destination_id, limit + 1, before)
    return page_of(rows, limit, service.delivery_view, lambda row: (row.created_at.isoformat(), str(row.id)))
