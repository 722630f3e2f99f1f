"""The API process. It never imports torch: specs are validated and artifacts checked without it."""

import contextlib
from collections.abc import AsyncIterator
from typing import Any

import structlog
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from sqlalchemy.exc import DataError, OperationalError
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse

from fedssl.protocol.errors import PROBLEM_MEDIA_TYPE, Problem
from fedssl_coordinator.artifacts import endpoints as artifacts
from fedssl_coordinator.body_limit import BodyLimit
from fedssl_coordinator.catalogue import endpoints as catalogue
from fedssl_coordinator.clients import endpoints as clients
from fedssl_coordinator.db import transaction
from fedssl_coordinator.events import endpoints as events
from fedssl_coordinator.events.repository import record
from fedssl_coordinator.health import router as health
from fedssl_coordinator.problems import Happening, ProblemError
from fedssl_coordinator.runs import endpoints as runs
from fedssl_coordinator.settings import settings
from fedssl_coordinator.tokens import endpoints as tokens
from fedssl_coordinator.wakeups import Wakeups
from fedssl_coordinator.work import endpoints as work

log = structlog.get_logger(__name__)

_STATUS_SLUGS = {401: "unauthenticated", 403: "forbidden", 404: "not-found", 405: "method-not-allowed"}


@contextlib.asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    app.state.wakeups = Wakeups(settings().redis_url.get_secret_value())
    async with app.state.wakeups.running():
        yield


def create_app() -> FastAPI:
    """The application, with every route and the error handlers."""
    app = FastAPI(
        title="fedssl coordinator",
        version="1",
        summary="Federated self-supervised representation learning",
        lifespan=_lifespan,
        responses={"default": {"model": Problem, "description": "Problem details (RFC 9457)"}},
    )
    for router in (
        runs.router,
        events.router,
        catalogue.router,
        clients.router,
        tokens.router,
        work.router,
        artifacts.router,
        health,
    ):
        app.include_router(router)
    app.add_middleware(BodyLimit)
    app.add_exception_handler(ProblemError, _on_problem)
    app.add_exception_handler(RequestValidationError, _on_invalid)
    app.add_exception_handler(HTTPException, _on_http)
    app.add_exception_handler(DataError, _on_unstorable)
    app.add_exception_handler(OperationalError, _on_database_down)
    app.add_exception_handler(Exception, _on_crash)
    return app


def _response(problem: ProblemError) -> JSONResponse:
    return JSONResponse(
        problem.body(), status_code=problem.status, media_type=PROBLEM_MEDIA_TYPE, headers=problem.headers
    )


def _record(happening: Happening) -> None:
    """Refusals go to the audit log in a transaction of their own: the request's has been rolled back."""
    try:
        with transaction() as session:
            record(
                session,
                happening.kind,
                happening.message,
                run_id=happening.run_id,
                round_number=happening.round_number,
                client_id=happening.client_id,
                data=happening.data,
            )
    except (DataError, OperationalError) as error:
        log.warning("event.lost", kind=happening.kind, error=type(error).__name__)


async def _on_problem(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, ProblemError)
    if error.happening is not None:
        await run_in_threadpool(_record, error.happening)
    return _response(error)


async def _on_invalid(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    errors = [{"where": _where(entry), "what": entry["msg"]} for entry in error.errors()][:20]
    detail = "; ".join(f"{entry['where']}: {entry['what']}" for entry in errors[:5])
    happening = None
    if request.method == "POST" and request.url.path.startswith(("/v1/runs", "/v1/work")):
        # The caller is authenticated by now: its dependency runs before the body is judged.
        happening = Happening("request.refused", f"{request.url.path}: {detail}"[:2000].replace("\x00", ""))
    return await _on_problem(
        request, ProblemError("invalid-request", detail[:4000], errors=errors, happening=happening)
    )


def _where(entry: dict[str, Any]) -> str:
    """`spec.training.batch_size` and not `body.spec.training.batch_size`."""
    parts = [str(part) for part in entry["loc"]]
    return ".".join(parts[1:] if parts[:1] == ["body"] else parts) or "body"


async def _on_http(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    slug = _STATUS_SLUGS.get(error.status_code, "invalid-request")
    return _response(ProblemError(slug, f"{request.method} {request.url.path}: {error.detail}"))


async def _on_unstorable(request: Request, error: Exception) -> JSONResponse:
    return _response(ProblemError("invalid-request", "a value cannot be stored: it is out of range or holds a NUL"))


async def _on_database_down(request: Request, error: Exception) -> JSONResponse:
    log.warning("postgres.unreachable", error=type(error).__name__)
    detail = "the database does not answer: the request changed nothing, send it again shortly"
    return _response(ProblemError("unavailable", detail, headers={"Retry-After": "2"}))


async def _on_crash(request: Request, error: Exception) -> JSONResponse:
    log.error("request.crashed", path=request.url.path, exc_info=error)
    return _response(ProblemError("internal", "an unforeseen error; the coordinator's log has the details"))
