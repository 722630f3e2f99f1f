"""`/v1/runs/{run_id}/dimension-assignments`"""

from uuid import UUID

from fastapi import APIRouter

from fedssl.protocol.views import DimensionAssignmentView, Page
from fedssl_coordinator.core.db import DB
from fedssl_coordinator.federation import run_rows
from fedssl_coordinator.federation.dimensions import repository
from fedssl_coordinator.identity.authentication import Viewer

router = APIRouter(prefix="/v1/runs/{run_id}/dimension-assignments", tags=["runs"])


@router.get("")
def list_dimension_assignments(run_id: UUID, caller: Viewer, session: DB) -> Page[DimensionAssignmentView]:
    """List each client's dimensions of the embedding (SSD), on one page. Empty for methods that assign none."""
    run_rows.require(session, run_id)
    owned = repository.by_client(session, run_id)
    return Page(items=[DimensionAssignmentView(client_id=name, dimensions=owned[name]) for name in owned])
