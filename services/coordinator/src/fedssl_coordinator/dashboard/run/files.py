"""The Files tab: a run's weights, encoder, spec, model card and lineage, as `fedssl run pull` fetches them."""

import json
from collections.abc import Iterator
from typing import Annotated, NamedTuple
from uuid import UUID

import yaml
from fastapi import APIRouter, Path, Request
from sqlalchemy.orm import Session
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response, StreamingResponse

from fedssl.artifacts.header import LENGTH_BYTES, Header, header_length, parse_header
from fedssl.artifacts.store import digest_of_parts
from fedssl.client.model_card import card, lineage_of
from fedssl.client.model_files import encoder_part
from fedssl.errors import ArtifactError, ArtifactNotFound
from fedssl.protocol.states import JobState
from fedssl.protocol.views import RoundView, RunView, SiteRoundView
from fedssl_coordinator.core.db import DB, transaction
from fedssl_coordinator.core.problems import ProblemError
from fedssl_coordinator.core.store import store
from fedssl_coordinator.dashboard.layout.page import PageRoute, download, render
from fedssl_coordinator.dashboard.run import queries as run_queries
from fedssl_coordinator.dashboard.run import view as run_view
from fedssl_coordinator.dashboard.session import Viewing, WaitingViewing
from fedssl_coordinator.federation.evaluations import repository as evaluations
from fedssl_coordinator.federation.evaluations import service as evaluation_views
from fedssl_coordinator.federation.rounds import repository as rounds
from fedssl_coordinator.federation.runs import service
from fedssl_coordinator.federation.site_evaluations import repository as site_evaluations
from fedssl_coordinator.federation.site_evaluations import results as site_results
from fedssl_coordinator.storage.artifacts.streaming import artifact_response

router = APIRouter(route_class=PageRoute, include_in_schema=False)

_ROUNDS_OF_SITES = 8
_ROUNDS_AT_ONCE = 50
_MOST_EVALUATIONS = 500
_MOST_UPDATES = 20_000

Digest = Annotated[str, Path(pattern="^[0-9a-f]{64}$")]


@router.get("/runs/{run_id}/files")
def list_files(run_id: UUID, visitor: Viewing, session: DB) -> Response:
    """Show everything of the run that can be downloaded."""
    page = run_view.run_page(session, run_id)
    run = page.run
    named = [run.broadcast, run.initial_broadcast, run.server_state, run.model, run.initial_model]
    sizes = run_queries.sizes(session, [digest for digest in named if digest])
    kept = run_queries.kept_weights(session, run_id)
    return render("run_files.html", visitor, page=page, tab="files", sizes=sizes, kept=kept)


@router.get("/runs/{run_id}/files/weights/{digest}")
async def download_weights(run_id: UUID, digest: Digest, request: Request, visitor: WaitingViewing) -> Response:
    """Return the weights before or after one of the run's rounds, as safetensors."""

    def require() -> None:
        with transaction() as session:
            if not run_queries.has_weights(session, run_id, digest):
                raise ProblemError("not-found", f"Run {run_id} has no weights {digest[:8]}…: its Files tab lists them.")

    await run_in_threadpool(require)
    response = await run_in_threadpool(artifact_response, digest, request.headers)
    return download(response, f"weights-{digest[:8]}.safetensors")


@router.get("/runs/{run_id}/files/encoder.safetensors")
def download_encoder(run_id: UUID, visitor: WaitingViewing) -> Response:
    """Return only the encoder of the newest weights, as safetensors."""
    with transaction() as session:
        digest = service.model_digest(session, run_id, initial=False)
    size, content = _encoder(digest)
    headers = {"Content-Length": str(size)}
    response = StreamingResponse(content, media_type="application/octet-stream", headers=headers)
    return download(response, f"encoder-{str(run_id)[:8]}.safetensors")


@router.get("/runs/{run_id}/files/spec.yaml")
def download_spec(run_id: UUID, visitor: Viewing, session: DB) -> Response:
    """Return the spec as YAML, as `fedssl simulate` and `fedssl run submit` read it."""
    text = yaml.safe_dump(run_view.get(session, run_id).spec, sort_keys=False, allow_unicode=True)
    return download(Response(text, media_type="application/yaml"), f"spec-{str(run_id)[:8]}.yaml")


@router.get("/runs/{run_id}/files/lineage.json")
def download_lineage(run_id: UUID, visitor: WaitingViewing) -> Response:
    """Return the digests of every file from which the weights were made."""
    text = json.dumps(_facts(run_id).lineage, indent=2)
    return download(Response(text, media_type="application/json"), f"lineage-{str(run_id)[:8]}.json")


@router.get("/runs/{run_id}/files/model-card.md")
def download_card(run_id: UUID, visitor: WaitingViewing) -> Response:
    """Return the model card, in Markdown."""
    facts = _facts(run_id)
    with transaction() as session:
        rows = evaluations.in_order(session, run_id, _MOST_EVALUATIONS, None)
        judged = [evaluation_views.view(row) for row in rows if row.state == JobState.COMPLETED]
        sites = _newest_of_sites(session, facts.run)
    text = card(facts.run, facts.rounds, judged, facts.lineage, sites)
    return download(Response(text, media_type="text/markdown; charset=utf-8"), f"model-card-{str(run_id)[:8]}.md")


def _newest_of_sites(session: Session, run: RunView) -> list[SiteRoundView]:
    """Return the newest round that a site has evaluated, of the last ones that sites were asked about."""
    if run.spec.site_evaluation is None:
        return []
    for number in site_evaluations.newest_rounds(session, run.id, _ROUNDS_OF_SITES):
        view = site_results.view(run.spec, site_evaluations.of_round(session, run.id, number))
        if view.mean and number <= run.rounds_closed:
            return [view]
    return []


class _Facts(NamedTuple):
    run: RunView
    rounds: list[RoundView]
    lineage: dict[str, object]


def _facts(run_id: UUID) -> _Facts:
    """Return what card and lineage describe. Raises ProblemError if there are no weights, or too many updates."""
    with transaction() as session:
        digest = service.model_digest(session, run_id, initial=False)
        run = service.show(session, run_id)
        found = [row for row in _closed(session, run_id) if row.number <= run.rounds_closed]
    return _Facts(run, found, lineage_of(run, found, digest, digest_of_parts(_encoder(digest)[1])))


def _closed(session: Session, run_id: UUID) -> list[RoundView]:
    found: list[RoundView] = []
    while rows := rounds.oldest_first(session, run_id, _ROUNDS_AT_ONCE, found[-1].number if found else 0):
        found += service.round_views(session, service.fitting(session, rows))
        if sum(len(row.assignments) for row in found) > _MOST_UPDATES:
            detail = f"This run has more than {_MOST_UPDATES:,} updates: `fedssl run pull` writes its card and lineage."
            raise ProblemError("conflict", detail)
    return found


def _encoder(digest: str) -> tuple[int, Iterator[bytes]]:
    """Return the size and the bytes of the file that holds only the encoder of some weights. Raises ProblemError."""
    try:
        header = _header(digest)
        beginning, entries = encoder_part(header, f"artifact {digest[:8]}…")
    except ArtifactNotFound as error:
        raise ProblemError("not-found", str(error)) from None
    except ArtifactError as error:
        raise ProblemError("conflict", f"There is no encoder to download: {error}") from None

    def content() -> Iterator[bytes]:
        yield beginning
        for entry in entries:
            yield from store().read(digest, header.data_start + entry.start, header.data_start + entry.stop)

    return len(beginning) + sum(entry.stop - entry.start for entry in entries), content()


def _header(digest: str) -> Header:
    size = store().size(digest)
    first = b"".join(store().read(digest, 0, min(LENGTH_BYTES, size)))
    end = LENGTH_BYTES + header_length(first, size)
    return parse_header(b"".join(store().read(digest, LENGTH_BYTES, end)))
