"""`/runs`: the runs that need attention, and one row per run."""

from datetime import datetime
from typing import Annotated, Any, Literal
from uuid import UUID

from fastapi import APIRouter, Query, Request
from starlette.responses import Response

from fedssl_coordinator.core.db import DB
from fedssl_coordinator.core.paging import Cursor, decode_cursor
from fedssl_coordinator.dashboard.layout.page import PageRoute, render
from fedssl_coordinator.dashboard.runs import overview
from fedssl_coordinator.dashboard.runs.queries import GROUPS
from fedssl_coordinator.dashboard.session import Viewing

router = APIRouter(route_class=PageRoute, include_in_schema=False)

Group = Literal["all", "active", "finished", "failed"]
Text = Annotated[str, Query(max_length=100)]


@router.get("/runs")
def list_runs(
    request: Request, visitor: Viewing, session: DB, group: Group = "all", q: Text = "", cursor: Cursor = None
) -> Response:
    """Show the list, or only its table if a script requests it."""
    before = decode_cursor(cursor, datetime.fromisoformat, UUID) if cursor else None
    listed = overview.overview(session, before, group, q.strip().replace("\x00", ""))
    context: dict[str, Any] = {"listed": listed, "group": group, "q": q, "is_first": cursor is None}
    if request.headers.get("hx-target") == "list":
        return render("runs_table.html", visitor, **context)
    facts, counts, paused = overview.totals(session)
    groups = {key: name for key, (name, _) in GROUPS.items()}
    attention = overview.needing_attention(session, listed.rows)
    return render(
        "runs.html", visitor, facts=facts, counts=counts, paused=paused, groups=groups, attention=attention, **context
    )
