"""Reads and writes tokens."""

from collections.abc import Sequence
from typing import Any, NamedTuple
from uuid import UUID, uuid4

from sqlalchemy import and_, bindparam, delete, exists, func, or_, select, tuple_, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.orm import Session

from fedssl.protocol.tokens import Role
from fedssl_coordinator.core.db import among, from_now
from fedssl_coordinator.core.models import Client, Token, table_of

_tokens, _clients = table_of(Token).c, table_of(Client).c

# A used enrolment grants nothing, but its worker may repeat the request, however late, if the response was lost.
_is_valid = and_(
    _tokens.revoked_at.is_(None),
    or_(_tokens.expires_at.is_(None), _tokens.expires_at > func.now(), _tokens.used_at.is_not(None)),
    _clients.revoked_at.is_(None),
)

# Statements on tables that are built once take a third of the time of statements on mapped classes. They are not
# restricted to a project: only workers' requests, which never are, use them.
is_workers = and_(
    _clients.id == _tokens.client_id, _tokens.secret_hash == bindparam("secret"), _tokens.role == Role.WORKER, _is_valid
)
"""An SQL expression on the tables of tokens and clients: `secret` is the hash of this client's valid worker's token."""

SEEN = (
    update(table_of(Client))
    .where(is_workers)
    .values(last_seen_at=func.now())
    .returning(_tokens.id.label("token_id"), _clients.id.label("client_id"))
)
"""Records that the client of the valid worker's token with the hash `secret` was seen now."""

_VALID = select(Token).outerjoin(Client, Client.id == Token.client_id).where(_is_valid)
_FOUND = _VALID.where(Token.secret_hash == bindparam("secret"))


def find(session: Session, secret_hash: str) -> Token | None:
    """Return the token with this hash, unless it has expired, or it or its client is revoked."""
    return session.scalars(_FOUND, {"secret": secret_hash}).one_or_none()


class SeenWorker(NamedTuple):
    """A valid worker's token, and its client."""

    id: UUID
    client_id: str


def seen(session: Session, secret_hash: str) -> SeenWorker | None:
    """Record that a worker's client was seen now, if the token with this hash is a worker's and valid."""
    row = session.execute(SEEN, {"secret": secret_hash}).one_or_none()
    return None if row is None else SeenWorker(*row)


def get(session: Session, token_id: UUID) -> Token:
    """Return an existing token."""
    return session.get_one(Token, token_id)


def is_valid(session: Session, token_id: UUID) -> bool:
    return session.scalars(_VALID.where(Token.id == token_id)).one_or_none() is not None


def still_valid(session: Session, token_ids: Sequence[UUID]) -> set[UUID]:
    """Return those of the tokens that are valid now."""
    return set(session.scalars(_VALID.where(among(Token.id, token_ids)).with_only_columns(Token.id)))


def expiry(seconds: int | None) -> Any:
    """Return an SQL expression for a time from now by the database's clock, or None for a token that never expires."""
    return None if seconds is None else from_now(seconds)


def add(session: Session, token: Token) -> None:
    session.add(token)
    session.flush()


def keep_newest(session: Session, subject: str, num_kept: int) -> None:
    """Delete a person's sign-ins that have ended, and all but the newest `num_kept` of the others."""
    open_ones = _VALID.where(Token.subject == subject).order_by(Token.created_at.desc(), Token.id.desc())
    kept = open_ones.limit(num_kept).with_only_columns(Token.id)
    session.execute(
        delete(Token)
        .where(Token.subject == subject, Token.id.not_in(kept.scalar_subquery()))
        .execution_options(synchronize_session=False)
    )


def newest_first(session: Session, limit: int, before: tuple[object, UUID] | None) -> Sequence[Token]:
    statement = select(Token).order_by(Token.created_at.desc(), Token.id.desc()).limit(limit)
    if before is not None:
        statement = statement.where(tuple_(Token.created_at, Token.id) < before)
    return session.scalars(statement).all()


def revoke(session: Session, token_id: UUID) -> bool:
    """Revoke a token, or return False if it does not exist. Revoking it again has no effect."""
    statement = (
        update(Token)
        .where(Token.id == token_id)
        .values(revoked_at=func.coalesce(Token.revoked_at, func.now()))
        .returning(Token.id)
    )
    return session.execute(statement).scalar_one_or_none() is not None


def has_worker(session: Session, client_id: str) -> bool:
    """Return whether the client has, or has had, a worker's token."""
    found = exists().where(Token.client_id == client_id, Token.role == Role.WORKER)
    return bool(session.scalar(select(found)))


def revoke_open_enrolments(session: Session, client_id: str) -> None:
    """Revoke the client's enrolment tokens that have not been used."""
    session.execute(
        update(Token)
        .where(
            Token.client_id == client_id,
            Token.role == Role.ENROLMENT,
            Token.used_at.is_(None),
            Token.revoked_at.is_(None),
        )
        .values(revoked_at=func.now())
        .execution_options(synchronize_session=False)
    )


def use(session: Session, enrolment_id: UUID) -> bool:
    """Mark an enrolment as used. Returns True for only one of several simultaneous callers."""
    statement = (
        update(Token)
        .where(
            Token.id == enrolment_id,
            Token.role == Role.ENROLMENT,
            Token.used_at.is_(None),
            Token.revoked_at.is_(None),
            Token.expires_at > func.now(),
        )
        .values(used_at=func.now())
        .returning(Token.id)
        .execution_options(synchronize_session=False)
    )
    return session.execute(statement).scalar_one_or_none() is not None


def add_enrolled(session: Session, enrolment: Token, secret_hash: str) -> UUID | None:
    """Add the worker's token that an enrolment becomes, or return None if a token with this hash already exists."""
    statement = (
        insert(Token)
        .values(
            id=uuid4(),
            role=Role.WORKER.value,
            client_id=enrolment.client_id,
            label=enrolment.label,
            secret_hash=secret_hash,
            enrolment_id=enrolment.id,
        )
        .on_conflict_do_nothing(index_elements=["secret_hash"])
        .returning(Token.id)
    )
    return session.execute(statement).scalar_one_or_none()


def enrolled(session: Session, enrolment_id: UUID) -> Token | None:
    """Return the worker's token that an enrolment has become."""
    return session.scalars(select(Token).where(Token.enrolment_id == enrolment_id)).one_or_none()
