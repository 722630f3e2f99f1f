"""The evaluations of a run at its sites."""

from typing import Annotated
from uuid import UUID

from fastapi import APIRouter, Query

from fedssl.protocol.views import Page, SiteRoundView
from fedssl_coordinator.core.db import DB
from fedssl_coordinator.core.paging import Cursor, decode_cursor, page_of, round_number
from fedssl_coordinator.federation.site_evaluations import results
from fedssl_coordinator.identity.authentication import Viewer

router = APIRouter(tags=["evaluations"])

RoundLimit = Annotated[int, Query(ge=1, le=100, description="Number of rounds: each has a row per site.")]


@router.get("/v1/runs/{run_id}/site-evaluations")
def list_site_evaluations(
    run_id: UUID, caller: Viewer, session: DB, limit: RoundLimit = 10, cursor: Cursor = None
) -> Page[SiteRoundView]:
    """List the evaluated rounds of a run with the results of each site, of the worst one, their mean and pooled."""
    after = decode_cursor(cursor, round_number)[0] if cursor else None
    found = results.rounds(session, run_id, limit + 1, after)
    return page_of(found, limit, lambda view: view, lambda view: (view.round_number,))
