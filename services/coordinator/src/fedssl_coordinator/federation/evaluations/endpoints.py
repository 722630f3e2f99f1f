"""`/v1/evaluations`, and the list of a run's evaluations."""

from datetime import datetime
from typing import Any
from uuid import UUID

from fastapi import APIRouter, Response, status

from fedssl.protocol.views import EmbeddingMapView, EvaluationCreate, EvaluationView, Page
from fedssl_coordinator.core.db import DB
from fedssl_coordinator.core.openapi import problems
from fedssl_coordinator.core.paging import Cursor, Limit, decode_cursor, page_of, round_number
from fedssl_coordinator.federation import run_rows
from fedssl_coordinator.federation.evaluations import maps, repository, service
from fedssl_coordinator.identity.authentication import Operator, Viewer

router = APIRouter(tags=["evaluations"])

_EXISTS: dict[int | str, dict[str, Any]] = {
    status.HTTP_200_OK: {"description": "The same evaluation is completed, queued or running."}
}


@router.post("/v1/runs/{run_id}/evaluations", status_code=status.HTTP_201_CREATED, responses=_EXISTS | problems(409))
def request_evaluation(
    run_id: UUID, request: EvaluationCreate, response: Response, caller: Operator, session: DB
) -> EvaluationView:
    """Evaluate the encoder of a closed round on a registered data set.

    An evaluation that failed or was cancelled is queued again.
    """
    view, is_new = service.request(session, run_id, request)
    response.status_code = status.HTTP_201_CREATED if is_new else status.HTTP_200_OK
    return view


@router.get("/v1/runs/{run_id}/evaluations")
def list_evaluations(
    run_id: UUID, caller: Viewer, session: DB, limit: Limit = 100, cursor: Cursor = None
) -> Page[EvaluationView]:
    """List a run's evaluations by round: those that its spec asks for, and those on request."""
    run_rows.require(session, run_id)
    after = decode_cursor(cursor, round_number, datetime.fromisoformat, UUID) if cursor else None
    rows = repository.in_order(session, run_id, limit + 1, after)
    return page_of(rows, limit, service.view, lambda row: (row.round_number, row.created_at.isoformat(), str(row.id)))


@router.get("/v1/evaluations/{evaluation_id}")
def show_evaluation(evaluation_id: UUID, caller: Viewer, session: DB) -> EvaluationView:
    """Show one evaluation: its results, or its progress."""
    return service.show(session, evaluation_id)


@router.get("/v1/evaluations/{evaluation_id}/map")
def show_embedding_map(evaluation_id: UUID, caller: Viewer, session: DB) -> EmbeddingMapView:
    """Show the test images' representations as points on a map: at most 2,000, the same images for every round."""
    return maps.embedding_map(session, evaluation_id)


@router.post("/v1/evaluations/{evaluation_id}/cancel", responses=problems(409))
def cancel_evaluation(evaluation_id: UUID, caller: Operator, session: DB) -> EvaluationView:
    """Cancel an evaluation. Its run continues as before."""
    return service.cancel(session, evaluation_id)
