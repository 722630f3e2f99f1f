"""`/v1/work/site-evaluations`: only for workers."""

from fastapi import APIRouter, Response

from fedssl.protocol.site_work import SiteAnswer, SiteAnswered, SiteEvaluationItem
from fedssl_coordinator.core.db import DB
from fedssl_coordinator.core.openapi import problems
from fedssl_coordinator.federation.ledger_anchors import service as anchors
from fedssl_coordinator.federation.site_evaluations import service
from fedssl_coordinator.identity.authentication import WorkerId

router = APIRouter(prefix="/v1/work/site-evaluations", tags=["work"])


@router.post("/claim", responses={204: {"description": "There is nothing to evaluate."}})
def claim_site_evaluation(client_id: WorkerId, session: DB) -> SiteEvaluationItem | None:
    """Return the oldest evaluation that this client has not answered. It does not wait, and gives no lease."""
    item = service.claim(session, client_id)
    # FastAPI would send `null`.
    return Response(status_code=204) if item is None else item  # type: ignore[return-value]


@router.post("/submit", responses=problems(404, 409))
def submit_site_evaluation(request: SiteAnswer, client_id: WorkerId, session: DB) -> SiteAnswered:
    """Send a site's counts, or why it has none. The answer stays; the same one again gets the same reply."""
    answered = service.answer(session, client_id, request)
    return answered.model_copy(update={"receipt": anchors.record_anchor(session, client_id, request.anchor)})
