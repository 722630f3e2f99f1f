"""`/healthz` and `/readyz`, for orchestrators, without a token and without secrets; `/metrics`, for Prometheus."""

from fastapi import APIRouter, Response
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Gauge, generate_latest
from sqlalchemy import select
from sqlalchemy.exc import ProgrammingError, SQLAlchemyError

from fedssl.protocol.states import RunState
from fedssl.protocol.views import Health
from fedssl_coordinator.auth import Viewer
from fedssl_coordinator.db import DB, transaction
from fedssl_coordinator.models import Run
from fedssl_coordinator.runs import repository as runs

router = APIRouter(tags=["health"])


@router.get("/healthz")
def healthz() -> Health:
    """The process lives."""
    return Health(status="ok")


@router.get("/readyz", responses={503: {"model": Health}})
def readyz(response: Response) -> Health:
    """The process can serve: Postgres answers and has the tables. Redis is not asked for, the API serves without it."""
    try:
        with transaction() as session:
            session.execute(select(Run).limit(0))
    except ProgrammingError:
        response.status_code = 503
        return Health(status="unavailable", checks={"postgres": "not migrated: run `fedssl-coordinator migrate`"})
    except SQLAlchemyError as error:
        response.status_code = 503
        return Health(status="unavailable", checks={"postgres": type(error).__name__})
    return Health(status="ok", checks={"postgres": "ok"})


@router.get("/metrics", response_class=Response)
def metrics(caller: Viewer, session: DB) -> Response:
    """Counts for Prometheus, whose scrape sends a viewer's token."""
    registry = CollectorRegistry()
    gauge = Gauge("fedssl_runs", "Runs by state", ["state"], registry=registry)
    counts = runs.counts_by_state(session)
    for state in RunState:  # those without a run too: a series that comes and goes cannot be alerted on
        gauge.labels(state=state.value).set(counts.get(state, 0))
    return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)
