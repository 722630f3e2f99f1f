"""`/v1/clients`"""

from fastapi import APIRouter

from fedssl.protocol.base import ClientId
from fedssl.protocol.views import ClientEdit, ClientView, IdentityConfirmation, Page
from fedssl_coordinator.core.db import DB
from fedssl_coordinator.core.openapi import problems
from fedssl_coordinator.core.paging import Cursor, Limit, decode_cursor, page_of
from fedssl_coordinator.core.paging import client_id as as_client_id
from fedssl_coordinator.federation.clients import service
from fedssl_coordinator.identity import clients
from fedssl_coordinator.identity.authentication import Admin, Operator, Viewer

router = APIRouter(prefix="/v1/clients", tags=["clients"])


@router.get("")
def list_clients(caller: Viewer, session: DB, limit: Limit = 100, cursor: Cursor = None) -> Page[ClientView]:
    """List data owners by name."""
    after = decode_cursor(cursor, as_client_id)[0] if cursor else None
    return page_of(clients.by_name(session, limit + 1, after), limit, service.view, lambda row: (row.id,))


@router.get("/{client_id}")
def show_client(client_id: ClientId, caller: Viewer, session: DB) -> ClientView:
    """Show one data owner."""
    return service.show(session, client_id)


@router.patch("/{client_id}")
def edit_client(client_id: ClientId, request: ClientEdit, caller: Operator, session: DB) -> ClientView:
    """Change a client's display name. Its id stays, because seeds derive from it."""
    return service.edit(session, client_id, request)


@router.post("/{client_id}/identity", responses=problems(404, 409))
def confirm_identity(client_id: ClientId, request: IdentityConfirmation, caller: Admin, session: DB) -> ClientView:
    """Confirm the new identity key of a client's worker. Compare it with its owner before, by another channel."""
    return service.confirm_identity(session, client_id, request.identity)


@router.post("/{client_id}/revoke")
def revoke_client(client_id: ClientId, caller: Admin, session: DB) -> ClientView:
    """Revoke a client: its tokens and leases end now."""
    return service.revoke(session, client_id)
