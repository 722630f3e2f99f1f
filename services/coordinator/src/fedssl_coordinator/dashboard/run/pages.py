"""`/runs/{run_id}`: one run, updated while it changes, and the questions that its buttons ask."""

from collections.abc import AsyncIterator, Sequence
from typing import Annotated, Literal
from uuid import UUID

from fastapi import APIRouter, Query, Request
from sse_starlette.event import ServerSentEvent
from sse_starlette.sse import EventSourceResponse
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response

from fedssl.protocol.work import MetricName
from fedssl_coordinator.core.db import DB
from fedssl_coordinator.core.problems import ProblemError
from fedssl_coordinator.dashboard.layout.page import PageRoute, data, render, see_other
from fedssl_coordinator.dashboard.run import charts as run_charts
from fedssl_coordinator.dashboard.run import settings_words
from fedssl_coordinator.dashboard.run import sites as run_sites
from fedssl_coordinator.dashboard.run import view as run_view
from fedssl_coordinator.dashboard.run.activities import SHOWN_CLIENTS
from fedssl_coordinator.dashboard.session import MaySteer, PlacedViewing, Steering, Viewing
from fedssl_coordinator.federation.evaluations import maps
from fedssl_coordinator.federation.events import endpoints as events
from fedssl_coordinator.federation.runs import service
from fedssl_coordinator.identity.authentication import Caller

router = APIRouter(route_class=PageRoute, include_in_schema=False)

Verb = Literal["start", "pause", "resume", "stop"]
Names = Annotated[Sequence[str], Query(max_length=SHOWN_CLIENTS)]
EventId = Annotated[int, Query(ge=0, lt=2**63)]
Shape = Annotated[str, Query(max_length=64)]
Number = Annotated[int | None, Query(ge=1, le=100_000)]


@router.get("/runs/{run_id}")
def show_run(run_id: UUID, visitor: Viewing, session: DB) -> Response:
    """Show whether the run is healthy, whether it learns, and which clients it waits for."""
    page = run_view.run_page(session, run_id)
    panel = run_sites.panel(session, run_id, page.spec)
    return render(
        "run.html", visitor, page=page, summary=settings_words.summary(page.spec), sites=panel, tab="overview"
    )


@router.get("/runs/{run_id}/live")
def show_pieces(run_id: UUID, visitor: Viewing, session: DB, shape: Shape = "") -> Response:
    """Return the parts of the page that change; panels only if they differ from those on the page."""
    page = run_view.run_page(session, run_id)
    panel = run_sites.panel(session, run_id, page.spec) if shape != page.shape else None
    response = render("run_live.html", visitor, page=page, shape=shape, sites=panel)
    response.headers["Last-Event-ID"] = str(page.last_event_id)
    return response


@router.get("/runs/{run_id}/curves.json")
def show_curves(run_id: UUID, request: Request, visitor: Viewing, session: DB) -> Response:
    """Return accuracy and geometry by round."""
    return data(request, run_charts.curves(session, run_id))


@router.get("/runs/{run_id}/metric.json")
def show_metric(
    run_id: UUID, request: Request, visitor: Viewing, session: DB, name: MetricName, pin: Names = ()
) -> Response:
    """Return one metric of the clients by round."""
    return data(request, run_charts.metric(session, run_id, name, pin))


@router.get("/runs/{run_id}/heat.json")
def show_heat(run_id: UUID, request: Request, visitor: Viewing, session: DB, name: MetricName) -> Response:
    """Return one metric of every client in every round."""
    return data(request, run_charts.heat(session, run_id, name))


@router.get("/runs/{run_id}/embeddings.json")
def list_embeddings(run_id: UUID, request: Request, visitor: Viewing, session: DB) -> Response:
    """Return the rounds that have a map of embeddings."""
    return data(request, run_charts.embeddings(session, run_id))


@router.get("/runs/{run_id}/embedding.json")
def show_embedding(run_id: UUID, request: Request, visitor: Viewing, session: DB, evaluation: UUID) -> Response:
    """Return one round's map."""
    found = maps.embedding_map(session, evaluation)
    if found.run_id != run_id:
        raise ProblemError("not-found", f"Evaluation {evaluation} does not belong to this run.")
    return data(request, found.model_dump(mode="json"))


@router.get("/runs/{run_id}/outcomes.json")
def show_outcomes(run_id: UUID, request: Request, visitor: Viewing, session: DB) -> Response:
    """Return each client's outcome in every round."""
    return data(request, run_charts.outcomes(session, run_id))


@router.get("/runs/{run_id}/timeline.json")
def show_timeline(
    run_id: UUID, request: Request, visitor: Viewing, session: DB, client: Names = (), last: Number = None
) -> Response:
    """Return the clients' timeline over four rounds."""
    return data(request, run_charts.timeline(session, run_id, last, client))


@router.get("/runs/{run_id}/stream", response_class=EventSourceResponse)
async def stream_run(run_id: UUID, request: Request, visitor: PlacedViewing, after: EventId = 0) -> Response:
    """Stream the run's events to the page's EventSource."""
    await run_in_threadpool(events.require_run, run_id)
    resumed = request.headers.get("last-event-id", "")
    last_id = int(resumed) if resumed.isdigit() and len(resumed) < 19 else after
    return EventSourceResponse(_unnamed(request, run_id, last_id, visitor.caller))


async def _unnamed(request: Request, run_id: UUID, last_id: int, caller: Caller) -> AsyncIterator[ServerSentEvent]:
    """Yield the events without their kinds as names: an EventSource ignores names without a listener."""
    async for event in events.stream(request, run_id, last_id, caller):
        yield ServerSentEvent(id=event.id, data=event.data)


@router.get("/runs/{run_id}/{verb}/confirm")
def ask(run_id: UUID, verb: Verb, visitor: MaySteer, session: DB) -> Response:
    """Show the dialog's question as a page of its own, or the run if that is no longer possible."""
    page = run_view.run_page(session, run_id)
    if verb not in page.verbs:
        return see_other(f"/runs/{run_id}")
    return render("confirm.html", visitor, page=page, verb=verb)


@router.post("/runs/{run_id}/{verb}")
def steer(run_id: UUID, verb: Verb, visitor: Steering, session: DB) -> Response:
    """Start, pause, resume or stop the run."""
    service.change(session, run_id, verb)
    return see_other(f"/runs/{run_id}")
