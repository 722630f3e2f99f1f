"""`/v1/projects`"""

from typing import Any

from fastapi import APIRouter, Response, status

from fedssl.protocol.views import Page, ProjectCreate, ProjectView
from fedssl_coordinator.core.db import DB
from fedssl_coordinator.core.paging import Cursor, Limit, decode_cursor, page_of, registered_name
from fedssl_coordinator.identity.authentication import EveryProjectAdmin, Viewer
from fedssl_coordinator.identity.projects import service

router = APIRouter(prefix="/v1/projects", tags=["projects"])

_SAME: dict[int | str, dict[str, Any]] = {status.HTTP_200_OK: {"description": "This project existed already."}}


@router.post("", status_code=status.HTTP_201_CREATED, responses=_SAME)
def create_project(request: ProjectCreate, response: Response, caller: EveryProjectAdmin, session: DB) -> ProjectView:
    """Create a project. Runs, clients and data sets belong to one, and tokens may be restricted to one."""
    view, is_new = service.create(session, request.name)
    response.status_code = status.HTTP_201_CREATED if is_new else status.HTTP_200_OK
    return view


@router.get("")
def list_projects(caller: Viewer, session: DB, limit: Limit = 100, cursor: Cursor = None) -> Page[ProjectView]:
    """List the caller's projects by name."""
    after = decode_cursor(cursor, registered_name)[0] if cursor else None
    rows = service.by_name(session, limit + 1, after)
    return page_of(rows, limit, service.view, lambda row: (row.name,))
