"""`/v1/public-datasets` and `/v1/evaluation-datasets`"""

from typing import Any

from fastapi import APIRouter, Response, status
from sqlalchemy.orm import Session

from fedssl.protocol.base import RegisteredName
from fedssl.protocol.views import (
    EvaluationDatasetCreate,
    EvaluationDatasetView,
    Page,
    PublicDatasetCreate,
    PublicDatasetView,
)
from fedssl_coordinator.core.db import DB, transaction
from fedssl_coordinator.core.openapi import problems
from fedssl_coordinator.core.paging import Cursor, Limit, decode_cursor, page_of, registered_name
from fedssl_coordinator.identity.authentication import Viewer, WaitingOperator
from fedssl_coordinator.storage.datasets import repository, service
from fedssl_coordinator.storage.datasets.repository import Row
from fedssl_coordinator.storage.datasets.service import Create, Kind, View

router = APIRouter(prefix="/v1", tags=["data sets"])

_SAME: dict[int | str, dict[str, Any]] = {status.HTTP_200_OK: {"description": "These images already had this name."}}


@router.post("/public-datasets", status_code=status.HTTP_201_CREATED, responses=_SAME | problems(404, 409))
def register_public_dataset(
    request: PublicDatasetCreate, response: Response, caller: WaitingOperator
) -> PublicDatasetView:
    """Register public images that were uploaded as an artifact under a name, so that runs can refer to them."""
    return _register(service.PUBLIC, request, response)


@router.get("/public-datasets")
def list_public_datasets(
    caller: Viewer, session: DB, limit: Limit = 100, cursor: Cursor = None
) -> Page[PublicDatasetView]:
    """List public data sets by name."""
    return _page(service.PUBLIC, session, limit, cursor)


@router.get("/public-datasets/{name}")
def show_public_dataset(name: RegisteredName, caller: Viewer, session: DB) -> PublicDatasetView:
    """Show one public data set."""
    return service.show(session, service.PUBLIC, name)


@router.post("/evaluation-datasets", status_code=status.HTTP_201_CREATED, responses=_SAME | problems(404, 409))
def register_evaluation_dataset(
    request: EvaluationDatasetCreate, response: Response, caller: WaitingOperator
) -> EvaluationDatasetView:
    """Register labelled images that were uploaded as an artifact under a name, to evaluate encoders on them."""
    return _register(service.EVALUATION, request, response)


@router.get("/evaluation-datasets")
def list_evaluation_datasets(
    caller: Viewer, session: DB, limit: Limit = 100, cursor: Cursor = None
) -> Page[EvaluationDatasetView]:
    """List evaluation data sets by name."""
    return _page(service.EVALUATION, session, limit, cursor)


@router.get("/evaluation-datasets/{name}")
def show_evaluation_dataset(name: RegisteredName, caller: Viewer, session: DB) -> EvaluationDatasetView:
    """Show one evaluation data set."""
    return service.show(session, service.EVALUATION, name)


def _register(kind: Kind[Row, View], request: Create, response: Response) -> View:
    """Register a data set in two transactions. The images are read in between, because they may have to be fetched."""
    with transaction() as session:
        view, is_new = service.known(session, kind, request), False
    if view is None:
        numbers = service.about(kind, request.digest)
        with transaction() as session:
            view, is_new = service.register(session, kind, request, numbers)
    response.status_code = status.HTTP_201_CREATED if is_new else status.HTTP_200_OK
    return view


def _page(kind: Kind[Row, View], session: Session, limit: int, cursor: str | None) -> Page[View]:
    after = decode_cursor(cursor, registered_name)[0] if cursor else None
    rows = repository.by_name(session, kind.table, limit + 1, after)
    return page_of(rows, limit, kind.view_of, lambda row: (row.name,))
