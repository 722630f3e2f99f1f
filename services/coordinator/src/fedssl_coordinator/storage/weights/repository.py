"""Reads and writes registered weights."""

from collections.abc import Sequence
from typing import Any

from sqlalchemy import delete, select
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.orm import Session

from fedssl_coordinator.core.models import RegisteredWeights
from fedssl_coordinator.core.project_scope import UNRESTRICTED


def get(session: Session, name: str) -> RegisteredWeights | None:
    return session.get(RegisteredWeights, name)


def is_taken(session: Session, name: str) -> bool:
    """Return whether weights of any project have this name."""
    statement = select(RegisteredWeights.name).where(RegisteredWeights.name == name)
    return session.scalar(statement.execution_options(**{UNRESTRICTED: True})) is not None


def by_name(session: Session, limit: int, after: str | None) -> Sequence[RegisteredWeights]:
    statement = select(RegisteredWeights).order_by(RegisteredWeights.name).limit(limit)
    if after is not None:
        statement = statement.where(RegisteredWeights.name > after)
    return session.scalars(statement).all()


def add(session: Session, **values: Any) -> RegisteredWeights | None:
    """Add weights, or return None if the name is taken."""
    statement = insert(RegisteredWeights).values(**values).on_conflict_do_nothing().returning(RegisteredWeights)
    return session.scalars(statement).one_or_none()


def remove(session: Session, name: str) -> str | None:
    """Remove the name, and return the digest of its weights, or None if there is no such name."""
    statement = delete(RegisteredWeights).where(RegisteredWeights.name == name).returning(RegisteredWeights.digest)
    return session.scalar(statement)
