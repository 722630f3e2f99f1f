"""`/v1/weights`"""

from typing import Any

from fastapi import APIRouter, Response, status

from fedssl.protocol.base import RegisteredName
from fedssl.protocol.views import Page, WeightsCreate, WeightsView
from fedssl_coordinator.core.db import DB, transaction
from fedssl_coordinator.core.models import RegisteredWeights
from fedssl_coordinator.core.openapi import problems
from fedssl_coordinator.core.paging import Cursor, Limit, decode_cursor, page_of, registered_name
from fedssl_coordinator.identity.authentication import Operator, Viewer, WaitingOperator
from fedssl_coordinator.storage.datasets import repository as registered
from fedssl_coordinator.storage.weights import service

router = APIRouter(prefix="/v1/weights", tags=["weights"])

_SAME: dict[int | str, dict[str, Any]] = {status.HTTP_200_OK: {"description": "These weights already had this name."}}


@router.post(
    "",
    status_code=status.HTTP_201_CREATED,
    responses=_SAME | problems(404, 409),
)
def register_weights(request: WeightsCreate, response: Response, caller: WaitingOperator) -> WeightsView:
    """Register weights that were uploaded as an artifact under a name, so that runs can start from them."""
    with transaction() as session:
        found, is_new = service.known(session, request), False
    if found is None:
        numbers = service.about(request.digest)
        with transaction() as session:
            found, is_new = service.register(session, request, numbers)
    response.status_code = status.HTTP_201_CREATED if is_new else status.HTTP_200_OK
    return found


@router.get("")
def list_weights(caller: Viewer, session: DB, limit: Limit = 100, cursor: Cursor = None) -> Page[WeightsView]:
    """List registered weights by name."""
    after = decode_cursor(cursor, registered_name)[0] if cursor else None
    rows = registered.by_name(session, RegisteredWeights, limit + 1, after)
    return page_of(rows, limit, service.view, lambda row: (row.name,))


@router.get("/{name}")
def show_weights(name: RegisteredName, caller: Viewer, session: DB) -> WeightsView:
    """Show registered weights."""
    return service.show(session, name)


@router.delete("/{name}", status_code=status.HTTP_204_NO_CONTENT)
def remove_weights(name: RegisteredName, caller: Operator, session: DB) -> None:
    """Remove a name. Runs that were created with it still start from its weights, which they keep."""
    service.remove(session, name)
