"""The tables behind a run's panels, one page at a time, and its downloads."""

import csv
import io
import json
from collections.abc import Iterator
from typing import Annotated
from uuid import UUID

from fastapi import APIRouter, Path, Query, Request
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response, StreamingResponse

from fedssl.evaluation.comparable import names_of, setting_of
from fedssl_coordinator.core.db import DB, transaction
from fedssl_coordinator.core.problems import ProblemError
from fedssl_coordinator.dashboard.layout.client_labels import named
from fedssl_coordinator.dashboard.layout.page import PageRoute, download, render
from fedssl_coordinator.dashboard.run import member_queries, settings_words
from fedssl_coordinator.dashboard.run import queries as run_queries
from fedssl_coordinator.dashboard.run import view as run_view
from fedssl_coordinator.dashboard.run.activities import CAUSES
from fedssl_coordinator.dashboard.runs.run_status import verdict_reason
from fedssl_coordinator.dashboard.session import Viewing, WaitingViewing
from fedssl_coordinator.federation import run_rows
from fedssl_coordinator.federation.distillation import service as distillation
from fedssl_coordinator.federation.rounds import repository as rounds
from fedssl_coordinator.federation.rounds import round_metrics
from fedssl_coordinator.federation.runs import service
from fedssl_coordinator.federation.secure_rounds import service as secure_rounds
from fedssl_coordinator.storage.artifacts.streaming import artifact_response

router = APIRouter(route_class=PageRoute, include_in_schema=False)

PAGE = 100
_EVENTS_PER_CLIENT = 3
_ROWS_AT_ONCE = 5_000

Before = Annotated[int | None, Query(ge=1, lt=2**63)]
Number = Annotated[int, Path(ge=1, le=100_000)]
After = Annotated[str, Query(max_length=64)]
Attempt = Annotated[int, Query(ge=0, lt=2**31)]


@router.get("/runs/{run_id}/rounds")
def list_rounds(run_id: UUID, visitor: Viewing, session: DB, before: Before = None) -> Response:
    """Show a hundred rounds, newest first."""
    page = run_view.run_page(session, run_id)
    last = (before or 2**31) - 1
    rows = member_queries.rounds_before(session, run_id, last, PAGE)
    tallies = rounds.counts(session, [row.id for row in rows])
    shown = [(row, verdict_reason(row, tallies[row.id])) for row in rows]
    more = rows[-1].number if len(rows) == PAGE and rows[-1].number > 1 else None
    return render("run_rounds.html", visitor, tab="rounds", rows=shown, more=more, is_first=before is None, page=page)


@router.get("/runs/{run_id}/rounds/{number}")
def show_round(
    run_id: UUID, number: Number, visitor: Viewing, session: DB, after: After = "", attempt: Attempt = 0
) -> Response:
    """Show one round: its verdict, and one row per attempt of a client."""
    page = run_view.run_page(session, run_id)
    found = run_queries.rounds_between(session, run_id, number, number)
    if not found:
        raise ProblemError("not-found", f"Round {number} has not been opened yet: the run's page shows the newest.")
    attempts = member_queries.attempts_after(session, run_id, number, (after, attempt), PAGE + 1)
    metrics = round_metrics.by_client(session, run_id, number, sorted({one.client_id for one in attempts[:PAGE]}))
    tally = rounds.counts(session, [found[0].id])[found[0].id]
    return render(
        "run_round.html", visitor, tab="rounds", row=found[0], reason=verdict_reason(found[0], tally),
        causes=CAUSES,
        secure=secure_rounds.views(session, [found[0].id]).get(found[0].id),
        attempts=attempts[:PAGE], metrics=metrics, more=attempts[PAGE - 1] if len(attempts) > PAGE else None, page=page,
    )  # fmt: skip


@router.get("/runs/{run_id}/clients")
def list_members(run_id: UUID, visitor: Viewing, session: DB, after: After = "") -> Response:
    """Show each client's part in this run."""
    page = run_view.run_page(session, run_id)
    rows = member_queries.members_after(session, run_id, after, PAGE + 1)
    names = {client.id: client for client in named(run_queries.client_ids(session, run_id))}
    more = rows[PAGE - 1].client_id if len(rows) > PAGE else None
    ids = [row.client_id for row in rows]
    return render(
        "run_clients.html", visitor, tab="clients", rows=rows[:PAGE], names=names, more=more,
        devices=member_queries.devices(session, ids), shown_as=member_queries.display_names(session, ids),
        held=member_queries.resources(session, run_id, ids),
        last=member_queries.last_events(session, run_id, ids, _EVENTS_PER_CLIENT), page=page,
    )  # fmt: skip


@router.get("/runs/{run_id}/jobs")
def list_jobs(run_id: UUID, visitor: Viewing, session: DB) -> Response:
    """Show what the coordinator computed besides aggregations: evaluations and distillations."""
    page = run_view.run_page(session, run_id)
    jobs = [distillation.view(job) for job in run_queries.distillations(session, run_id, PAGE)]
    judged = run_queries.evaluations(session, run_id, PAGE)
    names = names_of(judged)
    settings = [names[setting_of(row)] for row in judged]
    return render(
        "run_jobs.html", visitor, tab="jobs", jobs=jobs, evaluations=judged, settings=settings, page=page
    )  # fmt: skip


@router.get("/runs/{run_id}/events")
def list_events(run_id: UUID, visitor: Viewing, session: DB, before: Before = None) -> Response:
    """Show the run's log, newest first."""
    found = run_queries.newest_events(session, run_id, PAGE + 1, before=before)
    more = found[PAGE - 1].id if len(found) > PAGE else None
    page = run_view.run_page(session, run_id)
    return render("run_events.html", visitor, tab="events", events=found[:PAGE], more=more, page=page)


@router.get("/runs/{run_id}/spec")
def show_spec(run_id: UUID, visitor: Viewing, session: DB) -> Response:
    """Show every setting, with the key that `--set` takes."""
    page = run_view.run_page(session, run_id)
    settings = [(key, settings_words.shown(value)) for key, value in settings_words.flat(page.run.spec).items()]
    return render("run_spec.html", visitor, tab="spec", settings=settings, page=page)


@router.get("/runs/{run_id}/spec.json")
def download_spec(run_id: UUID, visitor: Viewing, session: DB) -> Response:
    """Return the spec as `fedssl run submit` takes it."""
    text = json.dumps(run_view.get(session, run_id).spec, indent=2)
    return download(Response(text, media_type="application/json"), f"spec-{run_id}.json")


@router.get("/runs/{run_id}/encoder")
async def download_encoder(run_id: UUID, request: Request, visitor: WaitingViewing) -> Response:
    """Return the newest global weights as safetensors."""

    def find() -> str:
        with transaction() as session:
            return service.model_digest(session, run_id, initial=False)

    response = await run_in_threadpool(artifact_response, await run_in_threadpool(find), request.headers)
    return download(response, f"weights-{run_id}.safetensors")


@router.get("/runs/{run_id}/metrics.csv")
def download_metrics(run_id: UUID, visitor: Viewing, session: DB) -> Response:
    """Return every metric of every round as CSV, one number per line."""
    run_rows.require(session, run_id)
    return download(StreamingResponse(_lines(run_id), media_type="text/csv; charset=utf-8"), f"metrics-{run_id}.csv")


def _lines(run_id: UUID) -> Iterator[str]:
    yield "round,client,name,value\r\n"
    last_id = 0
    while True:
        with transaction() as session:  # one page a transaction: a slow reader holds no connection
            rows = round_metrics.oldest_first(session, run_id, None, _ROWS_AT_ONCE, last_id)
            text = io.StringIO()
            csv.writer(text).writerows((row.round_number, row.client_id or "", row.name, row.value) for row in rows)
        if not rows:
            return
        last_id = rows[-1].id
        yield text.getvalue()
