"""`/v1/public-datasets` and `/v1/evaluation-datasets`"""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

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
from fedssl_coordinator.core.models import EvaluationDataset, PublicDataset
from fedssl_coordinator.core.openapi import problems
from fedssl_coordinator.core.paging import Cursor, Limit, decode_cursor, page_of, registered_name
from fedssl_coordinator.identity.authentication import Viewer, WaitingOperator
from fedssl_coordinator.storage.datasets import repository, service

router = APIRouter(prefix="/v1", tags=["data sets"])

Create = TypeVar("Create", PublicDatasetCreate, EvaluationDatasetCreate)
View = TypeVar("View", PublicDatasetView, EvaluationDatasetView)

_SAME: dict[int | str, dict[str, Any]] = {status.HTTP_200_OK: {"description": "These images already had this name."}}


@router.post("/public-datasets", status_code=status.HTTP_201_CREATED, responses=_SAME | problems(404, 409))
def register_public_dataset(
    request: PublicDatasetCreate, response: Response, caller: WaitingOperator
) -> PublicDatasetView:
    """Register public images that were uploaded as an artifact under a name, so that runs can refer to them."""
    return _register(request, response, service.known_public, service.about_public, service.register_public)


@router.get("/public-datasets")
def list_public_datasets(
    caller: Viewer, session: DB, limit: Limit = 100, cursor: Cursor = None
) -> Page[PublicDatasetView]:
    """List public data sets by name."""
    after = decode_cursor(cursor, registered_name)[0] if cursor else None
    rows = repository.by_name(session, PublicDataset, limit + 1, after)
    return page_of(rows, limit, service.public_view, lambda row: (row.name,))


@router.get("/public-datasets/{name}")
def show_public_dataset(name: RegisteredName, caller: Viewer, session: DB) -> PublicDatasetView:
    """Show one public data set."""
    return service.show_public(session, name)


@router.post("/evaluation-datasets", status_code=status.HTTP_201_CREATED, responses=_SAME | problems(404, 409))
def register_evaluation_dataset(
    request: EvaluationDatasetCreate, response: Response, caller: WaitingOperator
) -> EvaluationDatasetView:
    """Register labelled images that were uploaded as an artifact under a name, to evaluate encoders on them."""
    return _register(request, response, service.known_evaluation, service.about_evaluation, service.register_evaluation)


@router.get("/evaluation-datasets")
def list_evaluation_datasets(
    caller: Viewer, session: DB, limit: Limit = 100, cursor: Cursor = None
) -> Page[EvaluationDatasetView]:
    """List evaluation data sets by name."""
    after = decode_cursor(cursor, registered_name)[0] if cursor else None
    rows = repository.by_name(session, EvaluationDataset, limit + 1, after)
    return page_of(rows, limit, service.evaluation_view, lambda row: (row.name,))


@router.get("/evaluation-datasets/{name}")
def show_evaluation_dataset(name: RegisteredName, caller: Viewer, session: DB) -> EvaluationDatasetView:
    """Show one evaluation data set."""
    return service.show_evaluation(session, name)


def _register(
    request: Create,
    response: Response,
    known: Callable[[Session, Create], View | None],
    about: Callable[[str], Mapping[str, int]],
    register: Callable[[Session, Create, Mapping[str, int]], tuple[View, bool]],
) -> View:
    """Register a data set in two transactions. The images are read in between, because they may have to be fetched."""
    with transaction() as session:
        view, is_new = known(session, request), False
    if view is None:
        facts = about(request.digest)
        with transaction() as session:
            view, is_new = register(session, request, facts)
    response.status_code = status.HTTP_201_CREATED if is_new else status.HTTP_200_OK
    return view
