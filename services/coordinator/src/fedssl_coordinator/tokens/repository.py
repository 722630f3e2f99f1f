"""Reads and writes tokens."""

from collections.abc import Sequence
from uuid import UUID

from sqlalchemy import Select, func, select, update
from sqlalchemy.orm import Session

from fedssl_coordinator.models import Client, Token


def find(session: Session, secret_hash: str) -> Token | None:
    """The token with this hash, unless it or its client is revoked."""
    return session.scalars(_valid().where(Token.secret_hash == secret_hash)).one_or_none()


def is_valid(session: Session, token_id: UUID) -> bool:
    return session.scalars(_valid().where(Token.id == token_id)).one_or_none() is not None


def add(session: Session, token: Token) -> None:
    session.add(token)
    session.flush()


def newest_first(session: Session, limit: int, before: tuple[object, UUID] | None) -> Sequence[Token]:
    statement = select(Token).order_by(Token.created_at.desc(), Token.id.desc()).limit(limit)
    if before is not None:
        statement = statement.where((Token.created_at < before[0]) | (
            (Token.created_at == before[0]) & (Token.id < before[1])))  # fmt: skip
    return session.scalars(statement).all()


def revoke(session: Session, token_id: UUID) -> bool:
    """False: there is no such token. Revoking twice is no error."""
    statement = (
        update(Token)
        .where(Token.id == token_id)
        .values(revoked_at=func.coalesce(Token.revoked_at, func.now()))
        .returning(Token.id)
    )
    return session.execute(statement).scalar_one_or_none() is not None


def _valid() -> Select[Token]:
    return (
        select(Token)
        .outerjoin(Client, Client.id == Token.client_id)
        .where(Token.revoked_at.is_(None), Client.revoked_at.is_(None))
    )
