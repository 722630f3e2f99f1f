"""`/reference`: the REST API, as this coordinator answers it."""

from fastapi import APIRouter, Request
from starlette.responses import Response

from fedssl_coordinator.dashboard.layout.page import PageRoute, render
from fedssl_coordinator.dashboard.reference import api_reference
from fedssl_coordinator.dashboard.session import Viewing

router = APIRouter(route_class=PageRoute, include_in_schema=False)


@router.get("/reference")
def show_reference(request: Request, visitor: Viewing) -> Response:
    """Show every operation and every object, generated from `/openapi.json` so that it is always correct."""
    document = request.app.openapi()
    groups, schemas = api_reference.groups(document), api_reference.schemas(document)
    return render("reference.html", visitor, groups=groups, schemas=schemas)
