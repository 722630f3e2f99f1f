"""`/events` and `/public-data`: the complete log, and the images that every client may hold."""

from typing import Annotated

from fastapi import APIRouter, Query
from starlette.responses import Response

from fedssl_coordinator.core.db import DB
from fedssl_coordinator.core.models import EvaluationDataset, PublicDataset
from fedssl_coordinator.dashboard.layout.page import PageRoute, render
from fedssl_coordinator.dashboard.run import queries as run_queries
from fedssl_coordinator.dashboard.session import Viewing
from fedssl_coordinator.storage.datasets import repository as datasets

router = APIRouter(route_class=PageRoute, include_in_schema=False)

PAGE = 100
_MOST_SETS = 500

Before = Annotated[int | None, Query(ge=1, lt=2**63)]


@router.get("/events")
def list_events(visitor: Viewing, session: DB, before: Before = None) -> Response:
    """Show a hundred events of all runs and clients, newest first."""
    found = run_queries.newest_events(session, None, PAGE + 1, before=before)
    more = found[PAGE - 1].id if len(found) > PAGE else None
    return render("events.html", visitor, events=found[:PAGE], more=more, is_first=before is None)


@router.get("/public-data")
def list_data(visitor: Viewing, session: DB) -> Response:
    """Show the registered data sets: the public ones, and those on which encoders are evaluated."""
    public = datasets.by_name(session, PublicDataset, _MOST_SETS, None)
    judged = datasets.by_name(session, EvaluationDataset, _MOST_SETS, None)
    return render("data.html", visitor, public=public, judged=judged)
