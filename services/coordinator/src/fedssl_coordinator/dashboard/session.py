"""The session of a signed-in person: a signed cookie that names a token, never the token itself.

The cookie states which token signed in and until when, under a MAC whose key only the coordinator has. It ends at that
time, at sign-out in this browser, and with its token: every request asks whether that is still valid.
"""

import hmac
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Annotated
from urllib.parse import parse_qsl, urlsplit
from uuid import UUID

from fastapi import Depends, Request
from sqlalchemy.orm import Session
from starlette.concurrency import run_in_threadpool

from fedssl.protocol.tokens import Role
from fedssl_coordinator.core import database_clock
from fedssl_coordinator.core.db import DB, transaction
from fedssl_coordinator.core.models import Token
from fedssl_coordinator.core.problems import ProblemError
from fedssl_coordinator.core.secrets import derived_key
from fedssl_coordinator.http.body_limit import SESSION_COOKIE
from fedssl_coordinator.identity.authentication import OPERATORS, VIEWERS, Caller, caller_with, hash_secret
from fedssl_coordinator.identity.concurrency_limit import place_of
from fedssl_coordinator.identity.tokens import repository as tokens

COOKIE = SESSION_COOKIE
LIFETIME_SECONDS = 12 * 60 * 60

_LONGEST_SECRET = 200
_MAX_FIELDS = 600
_PURPOSE = "fedssl/dashboard/"


@dataclass(frozen=True, slots=True)
class Visitor:
    """A person who has signed in. Each of their forms must contain `csrf`."""

    caller: Caller
    label: str
    csrf: str
    memberships: Mapping[str, str]

    @property
    def may_steer(self) -> bool:
        return self.caller.role in OPERATORS

    @property
    def may_revoke(self) -> bool:
        return self.caller.role is Role.ADMIN


def sign_in(session: Session, secret: str) -> str:
    """Return the cookie for a token's owner. Raises ProblemError if the owner may not see the page."""
    found = tokens.find(session, hash_secret(secret.strip())) if len(secret) <= _LONGEST_SECRET else None
    if found is None:
        raise ProblemError("unauthenticated", "this token is not valid: it may have expired or been revoked")
    if found.role not in VIEWERS:
        detail = f"this token has the role {found.role}; the page is for viewers, operators and admins"
        raise ProblemError("forbidden", detail)
    return cookie_of(session, found.id)


def cookie_of(session: Session, token_id: UUID) -> str:
    """Return the cookie of a new session, which the token has signed in."""
    return _signed(session, f"{token_id}.{int(time.time()) + LIFETIME_SECONDS}")


def visitor_of(session: Session, cookie: str | None) -> Visitor:
    """Return the cookie's owner. Raises ProblemError if it is forged or expired, or if its token is no longer valid."""
    token_id, _, until = (cookie or "").rpartition(".")[0].partition(".")
    if (
        cookie is None
        or not cookie.isascii()
        or not hmac.compare_digest(_signed(session, f"{token_id}.{until}"), cookie)
    ):
        raise _signed_out()
    token = session.get(Token, UUID(token_id)) if int(until) > time.time() else None
    if token is None or not tokens.is_valid(session, token.id):
        raise _signed_out()
    # The same in a later session of this person, so that a form typed before the session's end can still be sent.
    person = token.subject or str(token.id)
    csrf = hmac.new(derived_key(session, f"{_PURPOSE}csrf"), person.encode(), "sha256").hexdigest()
    return Visitor(caller_with(token), token.label, csrf, token.memberships or {})


def _signed(session: Session, text: str) -> str:
    mac = hmac.new(derived_key(session, f"{_PURPOSE}session"), text.encode(), "sha256").hexdigest()
    return f"{text}.{mac}"


def _signed_out() -> ProblemError:
    return ProblemError("unauthenticated", "sign in again: the session has ended, or its token has")


def require_same_origin(request: Request) -> None:
    """Raise ProblemError if another site sent the form. Browsers send the origin of a POST."""
    origin = request.headers.get("origin")
    site = request.headers.get("sec-fetch-site", "same-origin")
    try:
        is_own = origin is None or urlsplit(origin).netloc == request.url.netloc
    except ValueError:  # no address at all
        is_own = False
    if site not in ("same-origin", "none") or not is_own:
        raise ProblemError("forbidden", "this form was sent from another site: open the page directly and try again")


def require_csrf(visitor: Visitor, form: dict[str, str]) -> None:
    """Raise ProblemError for a form that is not from this person's pages."""
    if not hmac.compare_digest(visitor.csrf.encode(), form.get("csrf", "").encode()):
        raise ProblemError("forbidden", "this form is not from your session: go back, reload the page and try again")


async def _form(request: Request) -> dict[str, str]:
    body = (await request.body()).decode("utf-8", "replace")
    try:
        return dict(parse_qsl(body, keep_blank_values=True, max_num_fields=_MAX_FIELDS))
    except ValueError:
        raise ProblemError("invalid-request", f"a form may have at most {_MAX_FIELDS} fields") from None


def _visitor(request: Request, session: DB) -> Visitor:
    database_clock.compare(session)  # pages say how long ago something was
    return _noted(request, visitor_of(session, request.cookies.get(COOKIE)))


def _noted(request: Request, visitor: Visitor) -> Visitor:
    request.state.valid_session = visitor.caller.token_id  # as for a token that is sent to the API: for the rate limits
    request.state.visitor = visitor
    return visitor


async def _visitor_without_session(request: Request) -> Visitor:
    def find() -> Visitor:
        with transaction() as session:
            return visitor_of(session, request.cookies.get(COOKIE))

    return _noted(request, await run_in_threadpool(find))


Form = Annotated[dict[str, str], Depends(_form)]
Viewing = Annotated[Visitor, Depends(_visitor, scope="function")]
# For endpoints that wait or stream, which must not hold a database connection meanwhile.
WaitingViewing = Annotated[Visitor, Depends(_visitor_without_session)]


async def _placed(visitor: WaitingViewing) -> AsyncIterator[Visitor]:
    with place_of(visitor.caller.token_id):
        yield visitor


PlacedViewing = Annotated[Visitor, Depends(_placed)]


def _checked(request: Request, visitor: Viewing, form: Form) -> Visitor:
    require_same_origin(request)
    require_csrf(visitor, form)
    return visitor


Signed = Annotated[Visitor, Depends(_checked, scope="function")]


def _may_steer(visitor: Viewing) -> Visitor:
    if not visitor.may_steer:
        raise ProblemError("forbidden", "only operators and admins may do this; you are signed in as a viewer")
    return visitor


def _may_revoke(visitor: Viewing) -> Visitor:
    if not visitor.may_revoke:
        raise ProblemError("forbidden", f"only admins may do this; your role is {visitor.caller.role}")
    return visitor


def _steering(visitor: Signed) -> Visitor:
    return _may_steer(visitor)


def _revoking(visitor: Signed) -> Visitor:
    return _may_revoke(visitor)


# For pages with a form that only such people may send.
MaySteer = Annotated[Visitor, Depends(_may_steer, scope="function")]
MayRevoke = Annotated[Visitor, Depends(_may_revoke, scope="function")]
Steering = Annotated[Visitor, Depends(_steering, scope="function")]
Revoking = Annotated[Visitor, Depends(_revoking, scope="function")]
