"""`/healthz` and `/readyz` for orchestrators, without a token and without secrets, and `/metrics` for Prometheus."""

import asyncio

from fastapi import APIRouter, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Gauge, generate_latest
from sqlalchemy import select
from sqlalchemy.exc import ProgrammingError, SQLAlchemyError
from starlette.concurrency import run_in_threadpool

from fedssl.protocol.views import Health
from fedssl_coordinator.core.db import DB, transaction
from fedssl_coordinator.core.metrics import REGISTRY
from fedssl_coordinator.core.models import Run
from fedssl_coordinator.core.queues import queue_depths
from fedssl_coordinator.core.state_counts import count_by_state
from fedssl_coordinator.identity.authentication import EveryProjectViewer

router = APIRouter(tags=["health"])

_LABELS = {
    "runs": "state",
    "rounds": "verdict",
    "assignments": "state",
    "distillations": "state",
    "evaluations": "state",
    "notifications": "state",
    "clients": "state",
}


@router.get("/healthz")
async def healthz() -> Health:  # async: it needs no thread, because all of them may wait for Postgres
    """Report that the process is alive."""
    return Health(status="ok")


@router.get("/readyz", responses={503: {"model": Health}})
async def readyz(request: Request, response: Response) -> Health:
    """Report whether the process can serve: Postgres answers and has the tables. The API can serve without Redis."""
    # Not limited, so requests share one query: however many there are, they take one thread and one connection.
    query: asyncio.Task[Health] | None = getattr(request.app.state, "readiness_query", None)
    if query is None or query.done():
        query = request.app.state.readiness_query = asyncio.create_task(run_in_threadpool(_readiness))
    health = await asyncio.shield(query)
    if health.status != "ok":
        response.status_code = 503
    return health


def _readiness() -> Health:
    try:
        with transaction() as session:
            session.execute(select(Run).limit(0))
    except ProgrammingError:
        return Health(status="unavailable", checks={"postgres": "not migrated: run `fedssl-coordinator migrate`"})
    except SQLAlchemyError as error:
        return Health(status="unavailable", checks={"postgres": type(error).__name__})
    return Health(status="ok", checks={"postgres": "ok"})


@router.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
def metrics(caller: EveryProjectViewer, session: DB) -> Response:
    """Return metrics for Prometheus, which sends a viewer's token."""
    # First what is the same for every API process, from Postgres and the queues; then what this process has counted.
    shared = CollectorRegistry()
    found = count_by_state(session)
    for kind, label in _LABELS.items():
        gauge = Gauge(f"fedssl_{kind}", f"{kind.capitalize()} by {label}", [label], registry=shared)
        for state, number in found[kind].items():
            gauge.labels(state).set(number)
    depth = Gauge("fedssl_queue_depth", "Messages that wait in Redis", ["queue"], registry=shared)
    for queue, number in queue_depths().items():
        depth.labels(queue).set(number)
    return Response(generate_latest(shared) + generate_latest(REGISTRY), media_type=CONTENT_TYPE_LATEST)
