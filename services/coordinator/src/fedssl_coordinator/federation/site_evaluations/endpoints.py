"""The evaluations of a run at its sites."""

from typing import Annotated, Any
from uuid import UUID

from fastapi import APIRouter, Query, Response, status

from fedssl.protocol.views import CrossSiteView, Page, SiteEvaluationsCreate, SiteRoundView
from fedssl_coordinator.core.db import DB
from fedssl_coordinator.core.openapi import problems
from fedssl_coordinator.core.paging import Cursor, decode_cursor, page_of, round_number
from fedssl_coordinator.federation.site_evaluations import results, service
from fedssl_coordinator.identity.authentication import Operator, Viewer

router = APIRouter(tags=["evaluations"])

RoundLimit = Annotated[int, Query(ge=1, le=100, description="Number of rounds: each has a row per site.")]

CrossSiteRound = Annotated[
    int | None, Query(ge=0, le=100_000, description="The round; 0: before training. By default the newest with some.")
]

_ASKED: dict[int | str, dict[str, Any]] = {
    status.HTTP_200_OK: {"description": "Every site has answered or was asked before."}
}


@router.post(
    "/v1/runs/{run_id}/site-evaluations", status_code=status.HTTP_201_CREATED, responses=_ASKED | problems(409)
)
def request_site_evaluations(
    run_id: UUID, request: SiteEvaluationsCreate, response: Response, caller: Operator, session: DB
) -> SiteRoundView:
    """Ask the sites of a run to evaluate the encoder of a closed round. Those that refused it are asked again."""
    number, is_new = service.request(session, run_id, request.round_number)
    response.status_code = status.HTTP_201_CREATED if is_new else status.HTTP_200_OK
    return results.of_round(session, run_id, number)


@router.get("/v1/runs/{run_id}/site-evaluations")
def list_site_evaluations(
    run_id: UUID, caller: Viewer, session: DB, limit: RoundLimit = 10, cursor: Cursor = None
) -> Page[SiteRoundView]:
    """List the evaluated rounds of a run with the results of each site, of the worst one, their mean and pooled."""
    after = decode_cursor(cursor, round_number)[0] if cursor else None
    found = results.rounds(session, run_id, limit + 1, after)
    return page_of(found, limit, lambda view: view, lambda view: (view.round_number,))


@router.get("/v1/runs/{run_id}/cross-site")
def show_cross_site(run_id: UUID, caller: Viewer, session: DB, round_number: CrossSiteRound = None) -> CrossSiteView:
    """Show the results of each site's own classifier at every other site, for one round."""
    return results.cross_site(session, run_id, round_number)
