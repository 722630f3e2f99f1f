"""`/v1/tokens`, `/v1/enrolment-tokens` and `/v1/enrolments`"""

from datetime import datetime
from typing import Any
from uuid import UUID

from fastapi import APIRouter, Response, status

from fedssl.protocol.views import EnrolmentCreate, Page, TokenCreate, TokenCreated, TokenView
from fedssl.protocol.work import Enrol, Enrolled
from fedssl_coordinator.core.db import DB
from fedssl_coordinator.core.openapi import problems
from fedssl_coordinator.core.paging import Cursor, Limit, decode_cursor, page_of
from fedssl_coordinator.identity.authentication import Admin, Enrolling, Operator
from fedssl_coordinator.identity.tokens import repository, service

router = APIRouter(prefix="/v1", tags=["tokens"])

_SAME: dict[int | str, dict[str, Any]] = {status.HTTP_200_OK: {"description": "This token was already enrolled."}}


@router.post("/tokens", status_code=status.HTTP_201_CREATED, responses=problems(404, 409))
def create_token(request: TokenCreate, caller: Admin, session: DB) -> TokenCreated:
    """Create a token. Its secret is only in this response."""
    return service.create(session, request)


@router.get("/tokens")
def list_tokens(caller: Admin, session: DB, limit: Limit = 100, cursor: Cursor = None) -> Page[TokenView]:
    """List tokens without their secrets, newest first."""
    before = decode_cursor(cursor, datetime.fromisoformat, UUID) if cursor else None
    rows = repository.newest_first(session, limit + 1, before)
    return page_of(rows, limit, service.view, lambda row: (row.created_at.isoformat(), str(row.id)))


@router.delete("/tokens/{token_id}", status_code=status.HTTP_204_NO_CONTENT)
def revoke_token(token_id: UUID, caller: Admin, session: DB) -> None:
    """Revoke a token with immediate effect."""
    service.revoke(session, token_id)


@router.post("/enrolment-tokens", status_code=status.HTTP_201_CREATED, responses=problems(404, 409))
def create_enrolment_token(request: EnrolmentCreate, caller: Operator, session: DB) -> TokenCreated:
    """Create a single-use enrolment token for a client's worker. It replaces an unused one of the client.

    If the client has ever had a worker, this needs an admin's token.
    """
    return service.enrol(session, caller, request)


@router.post("/enrolments", status_code=status.HTTP_201_CREATED, responses=_SAME | problems(409))
def enrol(request: Enrol, response: Response, caller: Enrolling, session: DB) -> Enrolled:
    """Use an enrolment token: the token that the worker has created for itself becomes valid."""
    enrolled, is_new = service.redeem(session, caller, request)
    response.status_code = status.HTTP_201_CREATED if is_new else status.HTTP_200_OK
    return enrolled
