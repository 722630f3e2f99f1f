"""`/v1/runs`"""

from datetime import datetime
from typing import Annotated, Literal
from uuid import UUID

from fastapi import APIRouter, Header, Path, Query, Request, status
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response

from fedssl.protocol.states import RunState
from fedssl.protocol.views import (
    AssignmentView,
    MetricView,
    Page,
    RoundView,
    RunContinue,
    RunCreate,
    RunEdit,
    RunSummary,
    RunView,
)
from fedssl_coordinator.core.db import DB, transaction
from fedssl_coordinator.core.openapi import problems
from fedssl_coordinator.core.paging import (
    Cursor,
    LargeItemsLimit,
    Limit,
    client_id,
    database_id,
    decode_cursor,
    encode_cursor,
    page_of,
    round_number,
)
from fedssl_coordinator.core.problems import ProblemError
from fedssl_coordinator.federation import run_rows
from fedssl_coordinator.federation.rounds import repository as rounds
from fedssl_coordinator.federation.rounds import round_metrics
from fedssl_coordinator.federation.runs import service
from fedssl_coordinator.identity.authentication import Admin, Operator, Viewer, WaitingViewer
from fedssl_coordinator.storage.artifacts.streaming import DOWNLOAD, DOWNLOAD_HEAD, artifact_response

router = APIRouter(prefix="/v1/runs", tags=["runs"])

IdempotencyKey = Annotated[
    str | None,
    Header(
        pattern=r"^[\x21-\x7e]{1,200}$",
        description="A request that is sent again with the same key does not create a second run.",
    ),
]
Assignments = Annotated[bool, Query(description="Whether rounds contain their assignments. `counts` are always there.")]
Number = Annotated[int, Path(ge=1, le=100_000, description="The round's number.")]
MetricName = Annotated[str | None, Query(pattern=r"^[a-z0-9_/]{1,64}$", description="Only this metric.")]


@router.post("", status_code=status.HTTP_201_CREATED, responses=problems(404, 409))
def create_run(request: RunCreate, caller: Operator, session: DB, idempotency_key: IdempotencyKey = None) -> RunView:
    """Create a run from a spec, and start it unless `start` is false."""
    return service.create(session, request, idempotency_key)


@router.get("")
def list_runs(
    caller: Viewer, session: DB, limit: Limit = 100, cursor: Cursor = None, state: RunState | None = None
) -> Page[RunSummary]:
    """List runs, newest first."""
    before = decode_cursor(cursor, datetime.fromisoformat, UUID) if cursor else None
    rows = run_rows.newest_first(session, limit + 1, before, state)
    reasons = service.derived_reasons(session, rows)
    return page_of(
        rows, limit, lambda row: service.summary(row, reasons), lambda row: (row.created_at.isoformat(), str(row.id))
    )


@router.get("/{run_id}")
def show_run(run_id: UUID, caller: Viewer, session: DB, *, assignments: Assignments = True) -> RunView:
    """Show one run, with its round in progress."""
    return service.show(session, run_id, assignments=assignments)


@router.post("/{run_id}/start", responses=problems(409))
def start_run(run_id: UUID, caller: Operator, session: DB) -> RunView:
    """Start a created run."""
    return service.change(session, run_id, "start")


@router.post("/{run_id}/pause", responses=problems(409))
def pause_run(run_id: UUID, caller: Operator, session: DB) -> RunView:
    """Pause a run: it offers no new work, and updates in training are still accepted."""
    return service.change(session, run_id, "pause")


@router.post("/{run_id}/resume", responses=problems(409))
def resume_run(run_id: UUID, caller: Operator, session: DB) -> RunView:
    """Resume a paused run. Its open round gets a new deadline.

    A run that failed continues from its last closed round, if the cause of the failure may have been removed.
    """
    return service.change(session, run_id, "resume")


@router.post("/{run_id}/stop", responses=problems(409))
def stop_run(run_id: UUID, caller: Operator, session: DB) -> RunView:
    """End a run permanently. Its weights so far stay available."""
    return service.change(session, run_id, "stop")


@router.post("/{run_id}/continue", responses=problems(409))
def continue_run(run_id: UUID, request: RunContinue, caller: Operator, session: DB) -> RunView:
    """Train a completed run further, until it has `num_rounds` rounds in total.

    It continues with its weights, its state on the coordinator and the states that its clients still have.
    """
    return service.continue_run(session, run_id, request.num_rounds)


@router.patch("/{run_id}")
def edit_run(run_id: UUID, request: RunEdit, caller: Operator, session: DB) -> RunView:
    """Change a run's displayed name, tags or notes. Its spec and its result stay as they are."""
    return service.edit(session, run_id, request)


@router.delete("/{run_id}", status_code=status.HTTP_204_NO_CONTENT, responses=problems(409))
def delete_run(run_id: UUID, caller: Admin, session: DB) -> None:
    """Delete a finished run with its weights. The audit log keeps the run's events."""
    service.delete(session, run_id)


@router.get("/{run_id}/rounds")
def list_rounds(
    run_id: UUID,
    caller: Viewer,
    session: DB,
    limit: LargeItemsLimit = 50,
    cursor: Cursor = None,
    *,
    assignments: Assignments = True,
) -> Page[RoundView]:
    """List a run's rounds, oldest first."""
    run_rows.require(session, run_id)
    after = decode_cursor(cursor, database_id)[0] if cursor else 0
    rows = rounds.oldest_first(session, run_id, limit + 1, min(after, 2**31 - 1))
    shown = service.fitting(session, rows[:limit]) if assignments else rows[:limit]
    views = service.round_views(session, shown, assignments=assignments)
    return Page(items=views, next_cursor=encode_cursor(views[-1].number) if len(rows) > len(views) else None)


@router.get("/{run_id}/rounds/{number}/assignments")
def list_assignments(
    run_id: UUID, number: Number, caller: Viewer, session: DB, limit: Limit = 100, cursor: Cursor = None
) -> Page[AssignmentView]:
    """List a round's assignments, by client and attempt."""
    if not rounds.exists(session, run_id, number):
        run_rows.require(session, run_id)
        raise ProblemError("not-found", f"run {run_id} has no round {number} yet: see `GET /v1/runs/{run_id}/rounds`")
    after = decode_cursor(cursor, client_id, round_number) if cursor else ("", 0)
    rows = rounds.assignments_after(session, run_id, number, after, limit + 1)
    return page_of(rows, limit, service.assignment_view, lambda row: (row.client_id, row.attempt))


@router.get("/{run_id}/metrics")
def list_metrics(
    run_id: UUID,
    caller: Viewer,
    session: DB,
    name: MetricName = None,
    limit: Limit = 500,
    cursor: Cursor = None,
) -> Page[MetricView]:
    """List the metrics of every round, per client and for the round as a whole (`client_id` null)."""
    run_rows.require(session, run_id)
    after = decode_cursor(cursor, database_id)[0] if cursor else 0
    rows = round_metrics.oldest_first(session, run_id, name, limit + 1, after)
    return page_of(rows, limit, lambda row: MetricView.model_validate(row, from_attributes=True), lambda row: (row.id,))


def _digest(run_id: UUID, which: str) -> str:
    with transaction() as session:
        return service.model_digest(session, run_id, initial=which == "initial")


@router.head("/{run_id}/model", response_class=Response, responses=DOWNLOAD_HEAD | problems(409))
@router.get("/{run_id}/model", response_class=Response, responses=DOWNLOAD | problems(409))
async def download_model(
    run_id: UUID, request: Request, caller: WaitingViewer, which: Literal["latest", "initial"] = "latest"
) -> Response:
    """Download the run's global weights as safetensors: the newest, or those before training. `ETag` is their SHA-256.

    `Accept-Direct` works as for an artifact.
    """
    digest = await run_in_threadpool(_digest, run_id, which)
    return await run_in_threadpool(artifact_response, digest, request.headers, method=request.method, direct=True)
