"""`/v1/estimates`"""

from fastapi import APIRouter

from fedssl.protocol.views import EstimateRequest, EstimateView
from fedssl_coordinator.core.db import DB
from fedssl_coordinator.core.openapi import problems
from fedssl_coordinator.federation.estimates import service
from fedssl_coordinator.identity.authentication import Operator
from fedssl_coordinator.identity.projects import service as projects

router = APIRouter(prefix="/v1/estimates", tags=["runs"])


@router.post("", responses=problems(404, 409))
def estimate_run(request: EstimateRequest, caller: Operator, session: DB) -> EstimateView:
    """Estimate the bytes and the time of a run. Nothing is created.

    The first request for a method and a model starts the computation of the bytes, which takes a moment.
    """
    return service.estimate(session, projects.chosen(session, request.project), request.spec)
