"""The parts that every page shares: templates, headers, and the pages that report an error."""

import gzip
import hashlib
import json
from collections.abc import Callable, Coroutine, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import jinja2
import structlog
from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from sqlalchemy.exc import DataError
from starlette.datastructures import Headers
from starlette.middleware.gzip import GZipMiddleware
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from fedssl.errors import StoreUnavailable
from fedssl.protocol.errors import PROBLEM_MEDIA_TYPE
from fedssl_coordinator.core.db import UNREACHABLE, transaction
from fedssl_coordinator.core.problems import PREFIX, ProblemError
from fedssl_coordinator.dashboard.layout import formats, svg
from fedssl_coordinator.dashboard.session import COOKIE, Visitor, visitor_of

log = structlog.get_logger(__name__)

_HERE = Path(__file__).parent.parent
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; font-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
)
_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "same-origin",
    "Cache-Control": "no-store",
}
_COMPRESSED_FROM = 1_000
_SOON = {"Retry-After": "2"}


@lru_cache
def build() -> str:
    """Return a name that changes with the static files, so that browsers may keep them indefinitely."""
    digest = hashlib.sha256()
    for path in sorted((_HERE / "static").rglob("*")):
        if path.is_file():
            digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:12]


@lru_cache
def _templates() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_HERE / "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= formats.FILTERS
    environment.globals |= {"static": f"/static/{build()}", "bars": svg.bars}
    return environment


def render(template: str, visitor: Visitor | None, *, status: int = 200, **context: Any) -> HTMLResponse:
    """Return a page, or a piece of one."""
    text = _templates().get_template(template).render(visitor=visitor, **context)
    return HTMLResponse(text, status_code=status)


def data(request: Request, payload: Mapping[str, Any]) -> Response:
    """Return numbers for a chart, compressed if the browser accepts it."""
    body, headers = json.dumps(payload, separators=(",", ":"), allow_nan=False).encode(), {"Vary": "Accept-Encoding"}
    if len(body) >= _COMPRESSED_FROM and "gzip" in request.headers.get("accept-encoding", ""):
        body, headers["Content-Encoding"] = gzip.compress(body, 5), "gzip"
    return Response(body, media_type="application/json", headers=headers)


def download(response: Response, name: str) -> Response:
    """Return the response as a file of this name, which a browser saves."""
    response.headers["Content-Disposition"] = f'attachment; filename="{name}"'
    return response


def see_other(path: str) -> RedirectResponse:
    """Redirect after a form, so that a reload does not send it again."""
    return RedirectResponse(path, status_code=303)


def _address(request: Request) -> str:
    """Return the path of the page in the browser, even if a script requests only a piece of it."""
    try:
        shown = urlsplit(request.headers.get("hx-current-url") or str(request.url))
    except ValueError:
        shown = urlsplit("/runs")
    return f"{shown.path}?{shown.query}" if shown.query else shown.path


def _instead(request: Request, error: ProblemError) -> Response:
    if error.slug == "unauthenticated" and request.method == "GET":
        where = f"/sign-in?next={quote(_address(request), safe='/')}"
        is_piece = "hx-request" in request.headers
        return Response(status_code=204, headers={"HX-Redirect": where}) if is_piece else see_other(where)
    if error.slug == "unauthenticated" and "hx-request" not in request.headers:
        how = "sign in again in another tab, then reload this page to send the form again"
        error = ProblemError("unauthenticated", f"Nothing was changed: the session has ended. To keep the form, {how}.")
    return _reported(request, error)


def _reported(request: Request, error: ProblemError) -> Response:
    template = "problem_piece.html" if "hx-request" in request.headers else "problem.html"
    visitor = getattr(request.state, "visitor", None)  # signed in, if the error came after that
    response = render(template, visitor, status=error.status, problem=error.body(), slug=error.slug)
    response.headers.update(error.headers or {})
    return response


def is_for_people(request: Request) -> bool:
    """Return whether a browser asks for a page or sends a form, and not a program for data."""
    is_page = request.method in ("GET", "POST") and not request.scope["path"].startswith(("/v1/", "/static/"))
    return is_page and "text/html" in request.headers.get("accept", "")


def unknown_address(request: Request) -> Response:
    """Return the page for an address that no page has, with the navigation for those who have signed in."""
    try:
        with transaction() as session:
            request.state.visitor = visitor_of(session, request.cookies.get(COOKIE))
    except (ProblemError, *UNREACHABLE):
        pass
    return problem_page(request, ProblemError("not-found", "there is no page at this address"))


def problem_page(request: Request, error: ProblemError) -> Response:
    """Return the page for an error that no page reports itself."""
    response = _reported(request, error)
    response.headers.update(_HEADERS)
    return response


class ProblemPages:
    """Replaces problem+json by a page for browsers: the middlewares inside this one do not know the templates."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not is_for_people(Request(scope)):
            await self._app(scope, receive, send)
            return
        replaced: Message | None = None

        async def replace(message: Message) -> None:
            nonlocal replaced
            if message["type"] == "http.response.start":
                is_problem = Headers(raw=message["headers"]).get("content-type") == PROBLEM_MEDIA_TYPE
                replaced = message if is_problem else None
            if replaced is None:
                await send(message)
            elif message["type"] == "http.response.body":
                await _page_of(scope, replaced, message["body"])(scope, receive, send)

        await self._app(scope, receive, replace)


def _page_of(scope: Scope, start: Message, body: bytes) -> Response:
    """Return the page for a problem that was about to be sent as JSON, in one piece. It keeps the other headers."""
    sent = Headers(raw=start["headers"])
    headers = {name: value for name, value in sent.items() if name not in ("content-type", "content-length")}
    problem = json.loads(body)
    slug = problem["type"].removeprefix(PREFIX)
    return problem_page(Request(scope), ProblemError(slug, problem["detail"], headers=headers))


class PageRoute(APIRoute):
    """A route that reports errors as HTML, and sends the headers that keep foreign scripts out of the page."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()

        async def answer(request: Request) -> Response:
            try:
                response = await handler(request)
            except ProblemError as error:
                response = _instead(request, error)
            except RequestValidationError:
                response = _instead(request, ProblemError("not-found", "there is no page at this address"))
            except (DataError, UnicodeEncodeError):
                response = _instead(
                    request,
                    ProblemError("invalid-request", "the request contains a text or number that cannot be stored"),
                )
            except UNREACHABLE as error:
                log.warning("postgres.unreachable", error=type(error).__name__)
                detail = "The database is not answering. Runs continue without this page: workers keep their leases."
                response = _instead(request, ProblemError("unavailable", detail, headers=_SOON))
            except StoreUnavailable as error:
                log.warning("store.failed", error=str(error))
                detail = "The store of the artifacts is not answering. Other pages do not need it: try again shortly."
                response = _instead(request, ProblemError("unavailable", detail, headers=_SOON))
            for name, value in _HEADERS.items():
                response.headers.setdefault(name, value)
            return response

        return answer


class _Kept(StaticFiles):
    """Files under a name that changes with their content."""

    def get_path(self, scope: Scope) -> str:
        return super().get_path(scope).partition("/")[2]

    async def get_response(self, path: str, scope: Scope) -> Response:
        response = await super().get_response(path, scope)
        response.headers["X-Content-Type-Options"] = "nosniff"
        is_current = scope["path"].startswith(f"/static/{build()}/")
        response.headers["Cache-Control"] = "public, max-age=31536000, immutable" if is_current else "no-cache"
        return response


def static_files() -> GZipMiddleware:
    """Return the application that serves styles, scripts and fonts."""
    return GZipMiddleware(_Kept(directory=_HERE / "static"), minimum_size=_COMPRESSED_FROM)
