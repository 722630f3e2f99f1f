"""Who calls: bearer tokens, of which only a hash is stored."""

import hashlib
import secrets
from dataclasses import dataclass
from typing import Annotated
from uuid import UUID

from fastapi import Depends, Request
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from sqlalchemy.orm import Session
from starlette.concurrency import run_in_threadpool

from fedssl_coordinator.db import DB, transaction
from fedssl_coordinator.problems import ProblemError
from fedssl_coordinator.tokens import repository

_bearer = HTTPBearer(auto_error=False, description="`Authorization: Bearer <secret>`")
Credentials = Annotated[HTTPAuthorizationCredentials | None, Depends(_bearer)]


@dataclass(frozen=True, slots=True)
class Caller:
    """A valid token's owner; `client_id` is set exactly for workers."""

    token_id: UUID
    role: str
    client_id: str | None


def new_secret() -> str:
    """256 random bits, with a prefix by which scanners find a leaked one."""
    return f"fedssl_{secrets.token_urlsafe(32)}"


def hash_secret(secret: str) -> str:
    """What is stored. One round of sha256 is enough for 256 random bits: there is nothing to guess."""
    return hashlib.sha256(secret.encode()).hexdigest()


def _identify(session: DB, credentials: HTTPAuthorizationCredentials | None) -> Caller:
    found = repository.find(session, hash_secret(credentials.credentials)) if credentials else None
    if found is None:
        raise ProblemError(
            "unauthenticated",
            "send a valid token as `Authorization: Bearer ...`; it may have been revoked",
            headers={"WWW-Authenticate": "Bearer"},
        )
    return Caller(found.id, found.role, found.client_id)


def may_still(session: Session, caller: Caller) -> bool:
    """Whether the token is valid now: for what goes on long after it was shown."""
    return repository.is_valid(session, caller.token_id)


def _operator(session: DB, credentials: Credentials) -> Caller:
    caller = _identify(session, credentials)
    if caller.role != "operator":
        raise ProblemError("forbidden", "this needs an operator's token; yours is a worker's")
    return caller


def _worker(session: DB, credentials: Credentials) -> str:
    caller = _identify(session, credentials)
    if caller.client_id is None:
        raise ProblemError("forbidden", "this needs a worker's token; yours is an operator's")
    return caller.client_id


def _identified_at_once(credentials: HTTPAuthorizationCredentials | None) -> Caller:
    with transaction() as session:
        return _identify(session, credentials)


async def caller_of(request: Request) -> Caller:
    """For error handlers: FastAPI reads a body before it asks who sent it. Raises ProblemError."""
    return await run_in_threadpool(_identified_at_once, await _bearer(request))


async def _anyone_without_session(credentials: Credentials) -> Caller:
    return await run_in_threadpool(_identified_at_once, credentials)


async def _worker_without_session(credentials: Credentials) -> str:
    caller = await run_in_threadpool(_identified_at_once, credentials)
    if caller.client_id is None:
        raise ProblemError("forbidden", "this needs a worker's token; yours is an operator's")
    return caller.client_id


async def _operator_without_session(credentials: Credentials) -> Caller:
    caller = await run_in_threadpool(_identified_at_once, credentials)
    if caller.role != "operator":
        raise ProblemError("forbidden", "this needs an operator's token; yours is a worker's")
    return caller


Operator = Annotated[Caller, Depends(_operator, scope="function")]
WorkerId = Annotated[str, Depends(_worker, scope="function")]

# For endpoints that wait or stream: they must not hold a database connection meanwhile.
WaitingWorkerId = Annotated[str, Depends(_worker_without_session)]
WaitingOperator = Annotated[Caller, Depends(_operator_without_session)]
WaitingCaller = Annotated[Caller, Depends(_anyone_without_session)]
