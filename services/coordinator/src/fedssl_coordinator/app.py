"""The API process. It never imports torch: specs are validated and artifacts are checked without it."""

import contextlib
from collections.abc import AsyncIterator
from typing import Any

import structlog
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from sqlalchemy.exc import DataError
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response
from starlette.routing import Match, Mount

from fedssl.errors import StoreUnavailable
from fedssl.protocol.validation import message_of
from fedssl_coordinator.core.audit import record
from fedssl_coordinator.core.db import UNREACHABLE, BrokenReference, bound_sessions, transaction
from fedssl_coordinator.core.logs import about
from fedssl_coordinator.core.openapi import DocumentedAPI
from fedssl_coordinator.core.problems import AuditEvent, ProblemError, printable, problem_response
from fedssl_coordinator.core.project_scope import ProjectScope
from fedssl_coordinator.core.pubsub import Wakeups
from fedssl_coordinator.core.quota import Quota
from fedssl_coordinator.core.settings import settings
from fedssl_coordinator.core.telemetry import SUBJECT, Telemetry
from fedssl_coordinator.dashboard import endpoints as dashboard
from fedssl_coordinator.dashboard.layout.page import (
    ProblemPages,
    is_for_people,
    problem_page,
    static_files,
    unknown_address,
)
from fedssl_coordinator.federation import methods_endpoints as methods
from fedssl_coordinator.federation.clients import endpoints as clients
from fedssl_coordinator.federation.data_reports import endpoints as data_reports
from fedssl_coordinator.federation.dimensions import endpoints as dimensions
from fedssl_coordinator.federation.distillation import endpoints as distillation
from fedssl_coordinator.federation.estimates import endpoints as estimates
from fedssl_coordinator.federation.evaluations import endpoints as evaluations
from fedssl_coordinator.federation.events import endpoints as events
from fedssl_coordinator.federation.ledger_anchors import endpoints as anchors
from fedssl_coordinator.federation.runs import endpoints as runs
from fedssl_coordinator.federation.site_evaluations import endpoints as site_evaluations
from fedssl_coordinator.federation.work import endpoints as work
from fedssl_coordinator.federation.work import secure_endpoints as secure_work
from fedssl_coordinator.federation.work import site_evaluation_endpoints as site_evaluation_work
from fedssl_coordinator.federation.work.waiting_claims import WaitingClaims
from fedssl_coordinator.health import router as health
from fedssl_coordinator.http.body_limit import BodyLimit
from fedssl_coordinator.http.rate_limits import RateLimits
from fedssl_coordinator.http.shutdown import GracefulShutdown
from fedssl_coordinator.http.stall_timeout import StallTimeout
from fedssl_coordinator.identity.authentication import caller_of, token_id_of
from fedssl_coordinator.identity.projects import endpoints as projects
from fedssl_coordinator.identity.tokens import endpoints as tokens
from fedssl_coordinator.notifications import endpoints as notifications
from fedssl_coordinator.storage.artifacts import endpoints as artifacts
from fedssl_coordinator.storage.datasets import endpoints as datasets
from fedssl_coordinator.storage.uploads import endpoints as uploads
from fedssl_coordinator.storage.weights import endpoints as weights

log = structlog.get_logger(__name__)

_STATUS_SLUGS = {401: "unauthenticated", 403: "forbidden", 404: "not-found", 405: "method-not-allowed"}
_METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE")
_AUDITED = ("/v1/runs", "/v1/work", "/v1/artifacts", "/v1/uploads")
_MAX_ERRORS = 20
_MESSAGE_CHARACTERS = 500  # the limit of an event about a refusal, because it quotes what was sent
_MESSAGES = {
    "extra_forbidden": "there is no such key: remove it, or correct its spelling",
    "missing": "is missing",
    "json_invalid": "is not JSON",
}


@contextlib.asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    bound_sessions()
    app.state.wakeups = Wakeups(settings().redis_address)
    app.state.waiting_claims = WaitingClaims(app.state.wakeups)
    async with app.state.wakeups.running(), app.state.waiting_claims.running():
        yield


def create_app() -> FastAPI:
    """Create the application with all routes, middlewares and error handlers."""
    app = DocumentedAPI(
        title="fedssl coordinator",
        version="1",
        summary="Federated self-supervised representation learning",
        docs_url=None,  # these pages load scripts from a CDN; /openapi.json has their content
        redoc_url=None,
        redirect_slashes=False,  # the redirect would name the host that the caller sent
        lifespan=_lifespan,
        telemetry={"operation_spans": False, "logs": False},  # one span per request; our log has the errors
    )
    app.state.refusals = Quota(60)
    # Routes are searched in this order. None of the routers is included: FastAPI would search it twice per request, and
    # build each of its routes again at the first one.
    for router in (
        work.router,
        artifacts.router,
        runs.router,
        dimensions.router,
        distillation.router,
        estimates.router,
        evaluations.router,
        site_evaluations.router,
        site_evaluation_work.router,
        secure_work.router,
        events.router,
        methods.router,
        clients.router,
        anchors.router,
        data_reports.router,
        tokens.router,
        projects.router,
        notifications.router,
        uploads.router,
        datasets.router,
        weights.router,
        health,
        dashboard.router,
    ):
        app.router.routes.extend(router.routes)
    app.mount("/static", static_files())
    app.add_middleware(BodyLimit)
    app.add_middleware(StallTimeout)  # outside of the body limit, because that reads bodies
    # outside of both, so that no bodies are read while too many requests arrive
    app.add_middleware(RateLimits, find_token=token_id_of)
    app.add_middleware(GracefulShutdown)
    app.add_middleware(ProblemPages)  # outside of all that respond with a problem
    app.add_middleware(Telemetry)
    app.add_middleware(ProjectScope)
    app.add_exception_handler(ProblemError, _on_problem)
    app.add_exception_handler(RequestValidationError, _on_invalid)
    app.add_exception_handler(HTTPException, _on_http)
    app.add_exception_handler(DataError, _on_unstorable)
    app.add_exception_handler(UnicodeEncodeError, _on_unstorable)
    app.add_exception_handler(BrokenReference, _on_broken_reference)
    for unreachable in UNREACHABLE:
        app.add_exception_handler(unreachable, _on_database_down)
    app.add_exception_handler(StoreUnavailable, _on_store_down)
    app.add_exception_handler(Exception, _on_crash)
    return app


def _record(audit_event: AuditEvent, num_unrecorded: int) -> None:
    """Record a refusal in a transaction of its own, because the request's has been rolled back."""
    try:
        with transaction() as session:
            if num_unrecorded:
                message = f"{num_unrecorded} earlier refused requests were too many to record individually"
                record(session, "refusals.left_out", message, client_id=audit_event.client_id)
            record(
                session,
                audit_event.kind,
                printable(audit_event.message, _MESSAGE_CHARACTERS),
                run_id=audit_event.run_id,
                round_number=audit_event.round_number,
                client_id=audit_event.client_id,
                data=audit_event.data,
            )
    except (DataError, *UNREACHABLE) as error:
        log.warning("event.lost", kind=audit_event.kind, error=type(error).__name__)


async def _on_problem(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, ProblemError)
    if error.audit_event is not None:
        refusals, client_id = request.app.state.refusals, error.audit_event.client_id
        limit = settings().recorded_refusals_per_minute
        if not limit or refusals.take(client_id, limit):
            await run_in_threadpool(_record, error.audit_event, refusals.pop_num_refused(client_id))
    return problem_response(error)


async def _on_invalid(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    return await _refuse(request, [_error(entry) for entry in error.errors()[:_MAX_ERRORS]])


async def _on_http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code == 400:  # FastAPI's status for unparsable bodies: invalid UTF-8, or nested too deeply
        return await _refuse(request, [{"loc": ["body"], "msg": "cannot be read as JSON"}])
    if error.status_code == 404 and is_for_people(request):
        return await run_in_threadpool(unknown_address, request)
    headers = dict(error.headers or {})
    if error.status_code == 405 and (methods := _methods_of(request)):
        headers["Allow"] = ", ".join(methods)
    if error.status_code == 405 and request.method == "OPTIONS":
        return Response(status_code=204, headers=headers)
    slug = _STATUS_SLUGS.get(error.status_code, "invalid-request")
    detail = f"{request.method} {request.url.path}: {error.detail}"
    return problem_response(ProblemError(slug, detail, headers=headers))


def _methods_of(request: Request) -> list[str]:
    """Return the methods of a path: Starlette names those of a single route. Empty for paths of mounted files."""
    routes = [route for route in request.app.routes if not isinstance(route, Mount)]
    found = [
        method
        for method in _METHODS
        if any(route.matches({**request.scope, "method": method})[0] is Match.FULL for route in routes)
    ]
    return [*found, "OPTIONS"] if found else []


async def _on_unstorable(request: Request, error: Exception) -> JSONResponse:
    message = "a number is too large to be stored, or a text contains a NUL or an incomplete character"
    return await _refuse(request, [{"loc": ["body"], "msg": message}])


async def _on_broken_reference(request: Request, error: Exception) -> JSONResponse:
    detail = (
        "nothing was changed, because what this belongs to was deleted at the same moment, or because rows of a newer "
        "version belong to it: repeat the request to see what was deleted, and upgrade the coordinator if you get the "
        "same answer"
    )
    return problem_response(ProblemError("conflict", detail))


async def _refuse(request: Request, errors: list[dict[str, Any]]) -> JSONResponse:
    """Respond 422 with all errors, and record an event for requests that change something; 401 without a token."""
    try:
        caller = await caller_of(request)
    except ProblemError as problem:
        return problem_response(problem)
    except UNREACHABLE as down:
        return await _on_database_down(request, down)
    where = ", ".join(dict.fromkeys(_place(error) for error in errors))
    audit_event = None
    if request.method in ("POST", "PUT", "PATCH") and request.url.path.startswith(_AUDITED):
        what = "; ".join(f"{_place(error)}: {error['msg']}" for error in errors)
        message = f"{request.method} {request.url.path}: {what}"
        audit_event = AuditEvent("request.refused", message, client_id=caller.client_id)
    detail = f"nothing was changed; correct this and send it again: {where}"
    return await _on_problem(request, ProblemError("invalid-request", detail, errors=errors, audit_event=audit_event))


def _error(entry: dict[str, Any]) -> dict[str, Any]:
    """Return a validation error whose location has no `body`, such as `spec.training.batch_size`."""
    loc = list(entry["loc"])
    if loc[:1] == ["body"] and len(loc) > 1:
        loc = loc[1:]
    message = _MESSAGES.get(entry["type"]) or message_of(entry)
    return {"loc": [printable(str(part), 100) for part in loc], "msg": printable(message, 500)}


def _place(error: dict[str, Any]) -> str:
    return ".".join(error["loc"])


async def _on_database_down(request: Request, error: Exception) -> JSONResponse:
    log.warning("postgres.unreachable", error=type(error).__name__)
    detail = "the database does not answer at the moment: send the request again shortly"
    return problem_response(ProblemError("unavailable", detail, headers={"Retry-After": "2"}))


async def _on_store_down(request: Request, error: Exception) -> JSONResponse:
    log.warning("store.failed", error=str(error))
    detail = "the artifact store does not answer at the moment: send the request again shortly"
    return problem_response(ProblemError("unavailable", detail, headers={"Retry-After": "2"}))


async def _on_crash(request: Request, error: Exception) -> Response:
    with about(**request.scope.get(SUBJECT, {})):
        log.error("request.crashed", path=request.url.path, exc_info=error)
    problem = ProblemError("internal", "an unexpected error; the coordinator's log has the details")
    return problem_page(request, problem) if is_for_people(request) else problem_response(problem)
