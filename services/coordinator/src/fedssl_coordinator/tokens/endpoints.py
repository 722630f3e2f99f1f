"""`/v1/tokens`"""

from datetime import datetime
from uuid import UUID

from fastapi import APIRouter, status

from fedssl.protocol.views import Page, TokenCreate, TokenCreated, TokenView
from fedssl_coordinator.auth import Operator
from fedssl_coordinator.db import DB
from fedssl_coordinator.paging import Cursor, Limit, decode_cursor, page_of
from fedssl_coordinator.tokens import repository, service

router = APIRouter(prefix="/v1/tokens", tags=["tokens"])


@router.post("", status_code=status.HTTP_201_CREATED)
def create_token(request: TokenCreate, caller: Operator, session: DB) -> TokenCreated:
    """Make a token. Its secret is shown this once."""
    return service.create(session, request)


@router.get("")
def list_tokens(caller: Operator, session: DB, limit: Limit = 100, cursor: Cursor = None) -> Page[TokenView]:
    """Tokens without their secrets, newest first."""
    before = decode_cursor(cursor, datetime.fromisoformat, UUID) if cursor else None
    rows = repository.newest_first(session, limit + 1, before)
    return page_of(rows, limit, service.view, lambda row: (row.created_at.isoformat(), str(row.id)))


@router.delete("/{token_id}", status_code=status.HTTP_204_NO_CONTENT)
def revoke_token(token_id: UUID, caller: Operator, session: DB) -> None:
    """Revoke a token at once."""
    service.revoke(session, token_id)
