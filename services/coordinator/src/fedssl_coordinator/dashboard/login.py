"""`/sign-in` with a token, `/session`, and `/sign-out`."""

from typing import Literal
from urllib.parse import urlsplit

from fastapi import APIRouter, Request
from starlette.responses import Response

from fedssl_coordinator.core.db import DB
from fedssl_coordinator.core.problems import ProblemError
from fedssl_coordinator.core.settings import settings
from fedssl_coordinator.dashboard import session as sessions
from fedssl_coordinator.dashboard.layout.page import PageRoute, render, see_other
from fedssl_coordinator.dashboard.session import COOKIE, Form, Viewing

router = APIRouter(route_class=PageRoute, include_in_schema=False)


@router.get("/")
def home() -> Response:
    """Redirect to the list of runs, which is the front page."""
    return see_other("/runs")


@router.get("/sign-in")
def ask_for_token(next: str = "/runs") -> Response:  # noqa: A002
    """Show the form."""
    return sign_in_page(own_path(next))


@router.get("/session")
def check_session(visitor: Viewing) -> Response:
    """Answer 204 while the session continues. A page that a browser shows again without loading it asks this."""
    return Response(status_code=204)


@router.post("/sign-in")
def take_token(request: Request, form: Form, session: DB) -> Response:
    """Start a session. The token comes in the body and is not stored."""
    sessions.require_same_origin(request)
    wanted = own_path(form.get("next", ""))
    try:
        cookie = sessions.sign_in(session, form.get("token", ""))
    except ProblemError as error:
        return sign_in_page(wanted, error)
    return signed_in(request, wanted, cookie, "strict")


def sign_in_page(wanted: str, error: ProblemError | None = None) -> Response:
    """Return the page that offers to sign in, and reports why an earlier attempt failed."""
    text, status = (f"Not signed in: {error.detail}.", error.status) if error else ("", 200)
    issuer = settings().oidc_issuer
    provider = urlsplit(issuer).netloc if issuer else None
    return render("sign_in.html", None, status=status, next=wanted, error=text, provider=provider)


def signed_in(request: Request, path: str, cookie: str, samesite: Literal["lax", "strict"]) -> Response:
    """Return the start of a session, which leads to `path`."""
    response = see_other(path)
    response.set_cookie(
        COOKIE,
        cookie,
        max_age=sessions.LIFETIME_SECONDS,
        httponly=True,
        samesite=samesite,
        secure=request.url.scheme == "https",
    )
    return response


def own_path(path: str) -> str:
    """Return `path` if it belongs to this site, so that signing in never redirects to another one."""
    try:
        parts = urlsplit(path)
    except ValueError:
        return "/runs"
    is_own = path.startswith("/") and not path.startswith(("//", "/\\")) and not parts.scheme and not parts.netloc
    return path if is_own and path.isascii() and path.isprintable() else "/runs"
