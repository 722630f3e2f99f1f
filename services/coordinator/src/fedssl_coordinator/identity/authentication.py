"""Authentication and roles: bearer tokens, each with one role. Only their hashes are stored.

Every endpoint that needs a token has one of the parameters at the end of this file, which requires a role and adds it
to the OpenAPI document. An endpoint refuses roles that it does not name: no role implies another.
"""

import hashlib
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any
from uuid import UUID

from fastapi import Depends, Request
from fastapi.params import Security
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer, SecurityScopes
from sqlalchemy.orm import Session
from starlette.concurrency import run_in_threadpool

from fedssl.protocol.base import Digest
from fedssl.protocol.tokens import Role
from fedssl_coordinator.core.db import DB, transaction
from fedssl_coordinator.core.logs import say_about
from fedssl_coordinator.core.models import Token
from fedssl_coordinator.core.problems import ProblemError
from fedssl_coordinator.core.project_scope import restrict
from fedssl_coordinator.identity.tokens import repository
from fedssl_coordinator.identity.tokens.repository import SeenWorker

_SCHEME: dict[str, Any] = {
    "scheme_name": "HTTPBearer",
    "description": "`Authorization: Bearer <secret>`. An operation's security lists its roles; a token needs one of "
    "them.",
    "auto_error": False,
}
_bearer = HTTPBearer(**_SCHEME)
Credentials = Annotated[HTTPAuthorizationCredentials | None, Depends(_bearer)]

ADMINS = (Role.ADMIN,)
OPERATORS = (*ADMINS, Role.OPERATOR)
VIEWERS = (*OPERATORS, Role.VIEWER)
WORKERS = (Role.WORKER,)
_ROLES = "roles"  # in a request's state: who may send it, if its endpoint checks that itself

_WHOSE = {
    Role.ADMIN: "an admin's",
    Role.OPERATOR: "an operator's",
    Role.VIEWER: "a viewer's",
    Role.WORKER: "a worker's",
    Role.ENROLMENT: "an enrolment's",
}
_ENROL = ", which is only for a worker's first start (`fedssl-worker run --enrolment-token-file`)"


@dataclass(frozen=True, slots=True)
class Caller:
    """The owner of a valid token. `client_id` is set for tokens of workers and enrolments only.

    `project`: the project to which the owner is restricted, if any.
    """

    token_id: UUID
    role: Role
    client_id: str | None
    project: str | None = None


def new_secret() -> str:
    """Return 256 random bits with a prefix, by which scanners can find leaked secrets."""
    return f"fedssl_{secrets.token_urlsafe(32)}"


def hash_secret(secret: str) -> Digest:
    """Return the hash that is stored. One round of sha256 is enough, because 256 random bits cannot be guessed."""
    return hashlib.sha256(secret.encode()).hexdigest()


def may_still(session: Session, caller: Caller) -> bool:
    """Return whether the token is still valid, for requests that last long after they were authenticated."""
    return repository.is_valid(session, caller.token_id)


def require_valid(session: Session, token_id: UUID) -> None:
    """Raise ProblemError if a token is no longer valid, for requests that have begun while it was."""
    if not repository.is_valid(session, token_id):
        raise _unauthenticated()


def token_id_of(secret: str) -> UUID | None:
    """Return the id of the valid token with this secret, or None."""
    with transaction() as session:
        found = repository.find(session, hash_secret(secret))
        return None if found is None else found.id


def _unauthenticated() -> ProblemError:
    return ProblemError(
        "unauthenticated",
        "the token is missing, mistyped, expired or revoked: send a valid token as `Authorization: Bearer ...`",
        headers={"WWW-Authenticate": "Bearer"},
    )


def _identify(session: Session, credentials: HTTPAuthorizationCredentials | None) -> Caller:
    found = repository.find(session, hash_secret(credentials.credentials)) if credentials else None
    if found is None:
        raise _unauthenticated()
    say_about(client=found.client_id)
    return caller_with(found)


def caller_with(token: Token) -> Caller:
    """Return the owner of a valid token. The request is restricted to the owner's project from here on."""
    restrict(token.project)
    return Caller(token.id, Role(token.role), token.client_id, token.project)


def _require_role(caller: Caller, roles: Sequence[str]) -> Caller:
    if caller.role not in roles:
        *others, last = [_WHOSE[role] for role in reversed(Role) if role in roles]
        wanted = f"{', '.join(others)} or {last}" if others else last
        hint = _ENROL if caller.role is Role.ENROLMENT else ""
        raise ProblemError("forbidden", f"this needs {wanted} token; yours is {_WHOSE[caller.role]}{hint}")
    return caller


def _caller(request: Request, scopes: SecurityScopes, session: DB, credentials: Credentials) -> Caller:
    return _require_role(_remembered(request, _identify(session, credentials)), scopes.scopes)


def _remembered(request: Request, caller: Caller) -> Caller:
    request.state.valid_token = caller.token_id  # for the rate limits, which count by token from here on
    return caller


def _identified_at_once(credentials: HTTPAuthorizationCredentials | None) -> Caller:
    with transaction() as session:
        return _identify(session, credentials)


async def caller_of(request: Request) -> Caller:
    """Authenticate a request in an error handler: FastAPI parses bodies before it does. Raises ProblemError.

    The role is checked too, if the endpoint would have checked it itself.
    """
    caller = await run_in_threadpool(_identified_at_once, await _bearer(request))
    return _require_role(caller, getattr(request.state, _ROLES, tuple(Role)))


async def _caller_without_session(request: Request, scopes: SecurityScopes, credentials: Credentials) -> Caller:
    caller = await run_in_threadpool(_identified_at_once, credentials)
    return _require_role(_remembered(request, caller), scopes.scopes)


def _require_every_project(caller: Caller) -> Caller:
    if caller.project is not None:
        raise ProblemError("forbidden", f"this needs a token for every project; yours is for {caller.project}")
    return caller


Admin = Annotated[Caller, Security(_caller, scopes=ADMINS, scope="function")]
Operator = Annotated[Caller, Security(_caller, scopes=OPERATORS, scope="function")]
Viewer = Annotated[Caller, Security(_caller, scopes=VIEWERS, scope="function")]
Worker = Annotated[Caller, Security(_caller, scopes=WORKERS, scope="function")]
Enrolling = Annotated[Caller, Security(_caller, scopes=(Role.ENROLMENT,), scope="function")]


def _everywhere(caller: Admin) -> Caller:
    return _require_every_project(caller)


def _viewing_everywhere(caller: Viewer) -> Caller:
    return _require_every_project(caller)


EveryProjectAdmin = Annotated[Caller, Depends(_everywhere, scope="function")]
EveryProjectViewer = Annotated[Caller, Depends(_viewing_everywhere, scope="function")]

# For endpoints that wait or stream, and must not hold a database connection in the meantime.
WaitingViewer = Annotated[Caller, Security(_caller_without_session, scopes=VIEWERS)]
WaitingOperator = Annotated[Caller, Security(_caller_without_session, scopes=OPERATORS)]
WaitingOperatorOrWorker = Annotated[Caller, Security(_caller_without_session, scopes=(*OPERATORS, *WORKERS))]


@dataclass(frozen=True, slots=True)
class PresentedToken:
    """A token that is checked within the transaction that does the work, which saves a transaction per request."""

    _request: Request
    _credentials: HTTPAuthorizationCredentials | None
    _roles: Sequence[str]

    def caller(self, session: Session) -> Caller:
        """Return the token's owner. Raises ProblemError if it is not valid, or lacks the role."""
        return _require_role(_remembered(self._request, _identify(session, self._credentials)), self._roles)

    def working(self, session: Session) -> Caller:
        """Do the same for a worker's token, and record that its client was seen, in one statement."""
        found = repository.seen(session, self.secret_hash)
        return self.caller(session) if found is None else self.remember(found)

    @property
    def secret_hash(self) -> str:
        """The token's hash, for a statement that checks the token and does the work. Without a token, no row has it."""
        return hash_secret("" if self._credentials is None else self._credentials.credentials)

    def remember(self, worker: SeenWorker) -> Caller:
        """Return the token's owner: this worker, which such a statement has found."""
        say_about(client=worker.client_id)
        return _remembered(self._request, Caller(worker.id, Role.WORKER, worker.client_id))


class _Presented(HTTPBearer):
    """Reads a request's token, which is not checked yet.

    FastAPI is slow at dependencies, so this is one instead of two.
    """

    async def __call__(self, request: Request, scopes: SecurityScopes) -> PresentedToken:  # type: ignore[override]
        setattr(request.state, _ROLES, scopes.scopes)
        return PresentedToken(request, await super().__call__(request), scopes.scopes)


_presented = _Presented(**_SCHEME)

PresentedWorker = Annotated[PresentedToken, Security(_presented, scopes=WORKERS)]
PresentedOperatorOrWorker = Annotated[PresentedToken, Security(_presented, scopes=(*OPERATORS, *WORKERS))]


def client_of(caller: Worker) -> str:
    """Return the client of a worker's token."""
    assert caller.client_id is not None, "a worker's token has a client"
    return caller.client_id


WorkerId = Annotated[str, Depends(client_of, scope="function")]
