"""`/v1/runs/{run_id}/events`: the audit log of a run."""

from collections.abc import AsyncIterator
from typing import Annotated
from uuid import UUID

import structlog
from fastapi import APIRouter, Header, Query, Request
from sse_starlette.event import ServerSentEvent
from sse_starlette.sse import EventSourceResponse
from starlette.concurrency import run_in_threadpool

from fedssl.protocol.views import EventView, Page
from fedssl_coordinator.core import audit
from fedssl_coordinator.core.db import DB, UNREACHABLE, transaction
from fedssl_coordinator.core.enqueue import EVENTS_CHANNEL
from fedssl_coordinator.core.models import Event
from fedssl_coordinator.core.paging import Cursor, Limit, database_id, decode_cursor, page_of
from fedssl_coordinator.federation import run_rows
from fedssl_coordinator.federation.runs import service as runs
from fedssl_coordinator.identity.authentication import Caller, Viewer, may_still
from fedssl_coordinator.identity.concurrency_limit import PlacedViewer

router = APIRouter(prefix="/v1/runs/{run_id}/events", tags=["events"])

log = structlog.get_logger(__name__)

POLL_SECONDS = 2.0
_BATCH = 200
LAST_EVENT = "run.finished"

Kind = Annotated[str | None, Query(pattern=r"^[a-z_.]{1,64}$", description="Only events of this type.")]
LastEventId = Annotated[
    str | None, Header(pattern=r"^[0-9]{1,18}$", description="Resume after this event, as an EventSource does.")
]


def _view(row: Event) -> EventView:
    return EventView.model_validate(row, from_attributes=True)


@router.get("")
def list_events(
    run_id: UUID, caller: Viewer, session: DB, kind: Kind = None, limit: Limit = 100, cursor: Cursor = None
) -> Page[EventView]:
    """List a run's events, oldest first."""
    run_rows.require(session, run_id)
    after = decode_cursor(cursor, database_id)[0] if cursor else 0
    return page_of(audit.after(session, run_id, after, limit + 1, kind), limit, _view, lambda row: (row.id,))


def _next(run_id: UUID, last_id: int, caller: Caller) -> tuple[list[EventView], bool]:
    """Return further events, and whether they are the last: the run had finished before, or the token was revoked."""
    with transaction() as session:
        if not may_still(session, caller):
            return [], True
        is_over = runs.is_finished(session, run_id)
        return [_view(row) for row in audit.after(session, run_id, last_id, _BATCH)], is_over


def require_run(run_id: UUID) -> None:
    """Raise ProblemError if there is no such run, in a transaction of its own."""
    with transaction() as session:
        run_rows.require(session, run_id)


@router.get("/stream", response_class=EventSourceResponse, responses={200: {"content": {"text/event-stream": {}}}})
async def stream_events(
    run_id: UUID, request: Request, caller: PlacedViewer, last_event_id: LastEventId = None
) -> EventSourceResponse:
    """Stream a run's events as they happen (server-sent events). The stream ends when the run has finished."""
    await run_in_threadpool(require_run, run_id)
    return EventSourceResponse(stream(request, run_id, int(last_event_id or 0), caller))


async def stream(request: Request, run_id: UUID, last_id: int, caller: Caller) -> AsyncIterator[ServerSentEvent]:
    """Yield the events of a run after `last_id` as they happen, until the run has finished or the caller's token ends.

    A run that failed and was resumed has several events `run.finished`: only the last one ends the stream.
    """
    with request.app.state.wakeups.listen(EVENTS_CHANNEL) as woken:
        while True:
            try:
                events, is_over = await run_in_threadpool(_next, run_id, last_id, caller)
            except UNREACHABLE as error:  # the database will be back, so the stream stays open
                log.warning("postgres.unreachable", error=type(error).__name__)
                events, is_over = [], False
            for event in events:
                last_id = event.id
                yield ServerSentEvent(id=str(event.id), event=event.kind, data=event.model_dump_json())
            if is_over and (not events or (events[-1].kind == LAST_EVENT and len(events) < _BATCH)):
                return
            if not is_over and len(events) < _BATCH:
                await woken.wait(POLL_SECONDS)
