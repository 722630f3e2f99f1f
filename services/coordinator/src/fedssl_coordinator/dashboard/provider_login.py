"""`/sign-in/oidc`, for people who sign in at an OpenID Connect provider, and `/sign-out`, for everyone."""

import base64
import hmac
import json
from dataclasses import asdict, dataclass

import structlog
from fastapi import APIRouter, Request
from starlette.responses import Response

from fedssl_coordinator.core.db import DB, transaction
from fedssl_coordinator.core.problems import ProblemError
from fedssl_coordinator.dashboard import session as sessions
from fedssl_coordinator.dashboard.layout.page import PageRoute, render, see_other
from fedssl_coordinator.dashboard.login import own_path, sign_in_page, signed_in
from fedssl_coordinator.dashboard.session import COOKIE, Form, Signed
from fedssl_coordinator.identity.openid.provider import Attempt, Provider, provider
from fedssl_coordinator.identity.tokens import service as tokens

log = structlog.get_logger(__name__)

router = APIRouter(route_class=PageRoute, include_in_schema=False)

ATTEMPT_COOKIE = "fedssl_sign_in"
ID_TOKEN_COOKIE = "fedssl_id_token"
_PATH = "/sign-in/oidc"
_ATTEMPT_SECONDS = 600
_MAX_COOKIE = 3500  # browsers drop cookies of more than 4096 characters
_LONGEST_NEXT = 1000


@dataclass(frozen=True, slots=True)
class _Begun:
    """A sign-in as the browser keeps it until the provider sends it back: only this browser can finish it."""

    attempt: Attempt
    next: str

    def cookie(self) -> str:
        return base64.urlsafe_b64encode(json.dumps([asdict(self.attempt), self.next]).encode()).decode()

    @staticmethod
    def read(cookie: str) -> "_Begun | None":
        try:
            attempt, wanted = json.loads(base64.urlsafe_b64decode(cookie))
            begun = _Begun(Attempt(**attempt), own_path(wanted))
        except (ValueError, TypeError, AttributeError, RecursionError):
            return None
        parts = asdict(begun.attempt).values()
        return begun if all(isinstance(part, str) and part and part.isascii() for part in parts) else None


@router.get(_PATH)
def begin(request: Request, next: str = "/runs") -> Response:  # noqa: A002
    """Send the browser to the provider."""
    begun = _Begun(Attempt(), own_path(next[:_LONGEST_NEXT]))
    try:
        response = see_other(_provider().authorization_url(begun.attempt, _redirect_uri(request)))
    except ProblemError as error:
        return sign_in_page(begun.next, error)
    # Lax: the provider's site sends the browser back.
    response.set_cookie(ATTEMPT_COOKIE, begun.cookie(), max_age=_ATTEMPT_SECONDS, path=_PATH, httponly=True,
                        samesite="lax", secure=request.url.scheme == "https")  # fmt: skip
    return response


@router.get(f"{_PATH}/callback", name="finish_sign_in")
def finish(request: Request) -> Response:
    """Take the provider's answer, which is valid once, and only in the browser that began."""
    begun = _Begun.read(request.cookies.get(ATTEMPT_COOKIE, ""))
    answer = dict(request.query_params)
    try:
        response = _finish(request, begun, answer)
    except ProblemError as error:
        log.warning("person.refused", reason=error.detail)
        response = sign_in_page(begun.next if begun else "/runs", error)
    response.delete_cookie(ATTEMPT_COOKIE, path=_PATH, httponly=True, samesite="lax")
    return response


@router.post("/project")
def choose_project(visitor: Signed, form: Form, session: DB) -> Response:
    """Switch to another of the projects in which a person who has signed in at the provider has a role."""
    tokens.choose_project(session, visitor.caller.token_id, form.get("project", ""))
    return see_other("/runs")


@router.post("/sign-out")
def sign_out(request: Request, visitor: Signed, session: DB) -> Response:
    """End the session in this browser, and the person's session at the provider if the provider offers this."""
    response: Response = see_other("/sign-in")
    if tokens.sign_out(session, visitor.caller.token_id):
        try:
            back = str(request.url_for("ask_for_token"))
            at_provider = _provider().logout_url(request.cookies.get(ID_TOKEN_COOKIE), back)
        except ProblemError:  # the session here has ended in any case
            at_provider = None
        if at_provider is not None:
            # Not a redirect: the page's policy allows forms to lead only to this site.
            response = render("signed_out.html", None, at_provider=at_provider, host=_provider().host)
    response.delete_cookie(COOKIE, httponly=True, samesite="strict")
    response.delete_cookie(ID_TOKEN_COOKIE, path="/sign-out", httponly=True, samesite="strict")
    return response


def _finish(request: Request, begun: _Begun | None, answer: dict[str, str]) -> Response:
    state = answer.get("state", "").encode()
    if begun is None or not hmac.compare_digest(begun.attempt.state.encode(), state):
        detail = "this browser did not begin this sign-in, has finished it already, or took more than ten minutes"
        raise ProblemError("unauthenticated", f"{detail}: begin again")
    person, id_token = _provider().person(answer, begun.attempt, _redirect_uri(request))
    with transaction() as session:
        token_id = tokens.sign_in(session, person, sessions.LIFETIME_SECONDS)
        cookie = sessions.cookie_of(session, token_id)
    # Lax: with strict, the browser would not send the cookie on this way back from the provider's site.
    response = signed_in(request, begun.next, cookie, "lax")
    if len(id_token) <= _MAX_COOKIE:
        response.set_cookie(ID_TOKEN_COOKIE, id_token, max_age=sessions.LIFETIME_SECONDS, path="/sign-out",
                            httponly=True, samesite="strict", secure=request.url.scheme == "https")  # fmt: skip
    return response


def _redirect_uri(request: Request) -> str:
    return str(request.url_for("finish_sign_in"))


def _provider() -> Provider:
    found = provider()
    if found is None:
        raise ProblemError("not-found", "this coordinator has no sign-in provider: FEDSSL_OIDC_ISSUER is not set")
    return found
