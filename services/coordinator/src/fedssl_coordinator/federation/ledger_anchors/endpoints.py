"""`/v1/clients/{client_id}/ledger-anchors`"""

from fastapi import APIRouter

from fedssl.protocol.base import ClientId
from fedssl.protocol.views import LedgerAnchorView, Page
from fedssl_coordinator.core.db import DB
from fedssl_coordinator.core.paging import Cursor, Limit, database_id, decode_cursor, page_of
from fedssl_coordinator.federation.clients import service as clients
from fedssl_coordinator.federation.ledger_anchors import repository, service
from fedssl_coordinator.identity.authentication import Viewer

router = APIRouter(prefix="/v1/clients/{client_id}/ledger-anchors", tags=["clients"])


@router.get("")
def list_ledger_anchors(
    client_id: ClientId, caller: Viewer, session: DB, limit: Limit = 100, cursor: Cursor = None
) -> Page[LedgerAnchorView]:
    """List the anchors of a client's ledger, oldest first. The data owner compares the ledger with them."""
    clients.show(session, client_id)
    after = decode_cursor(cursor, database_id)[0] if cursor else 0
    rows = repository.after(session, client_id, after, limit + 1)
    return page_of(rows, limit, service.view, lambda row: (row.id,))
