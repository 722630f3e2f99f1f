"""`/sign-in` and `/sign-out`."""

from urllib.parse import urlsplit

from fastapi import APIRouter, Request
from starlette.responses import Response

from fedssl_coordinator.core.db import DB
from fedssl_coordinator.core.problems import ProblemError
from fedssl_coordinator.dashboard import session as sessions
from fedssl_coordinator.dashboard.layout.page import PageRoute, render, see_other
from fedssl_coordinator.dashboard.session import COOKIE, Form, Signed

router = APIRouter(route_class=PageRoute, include_in_schema=False)


@router.get("/")
def home() -> Response:
    """Redirect to the list of runs, which is the front page."""
    return see_other("/runs")


@router.get("/sign-in")
def ask_for_token(next: str = "/runs") -> Response:  # noqa: A002
    """Show the form."""
    return render("sign_in.html", None, next=_own(next), error="")


@router.post("/sign-in")
def take_token(request: Request, form: Form, session: DB) -> Response:
    """Start a session. The token comes in the body and is not stored."""
    sessions.require_same_origin(request)
    wanted = _own(form.get("next", ""))
    try:
        cookie = sessions.sign_in(session, form.get("token", ""))
    except ProblemError as error:
        return render("sign_in.html", None, status=error.status, next=wanted, error=f"Not signed in: {error.detail}.")
    response = see_other(wanted)
    response.set_cookie(
        COOKIE,
        cookie,
        max_age=sessions.LIFETIME_SECONDS,
        httponly=True,
        samesite="strict",
        secure=request.url.scheme == "https",
    )
    return response


@router.post("/sign-out")
def sign_out(visitor: Signed) -> Response:
    """End the session in this browser."""
    response = see_other("/sign-in")
    response.delete_cookie(COOKIE, httponly=True, samesite="strict")
    return response


def _own(path: str) -> str:
    """Return `path` if it belongs to this site, so that signing in never redirects to another one."""
    try:
        parts = urlsplit(path)
    except ValueError:
        return "/runs"
    is_own = path.startswith("/") and not path.startswith(("//", "/\\")) and not parts.scheme and not parts.netloc
    return path if is_own and path.isascii() and path.isprintable() else "/runs"
