"""Reads and writes what is registered under a name: data sets, and the weights of `storage.weights`."""

from collections.abc import Sequence
from typing import Any, TypeVar

from sqlalchemy import delete, select
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.orm import Session

from fedssl_coordinator.core.models import EvaluationDataset, PublicDataset, RegisteredWeights
from fedssl_coordinator.core.project_scope import UNRESTRICTED

Row = TypeVar("Row", PublicDataset, EvaluationDataset, RegisteredWeights)


def get(session: Session, table: type[Row], name: str) -> Row | None:
    return session.get(table, name)


def is_taken(session: Session, table: type[Row], name: str) -> bool:
    """Return whether a row of any project has this name."""
    statement = select(table.name).where(table.name == name).execution_options(**{UNRESTRICTED: True})
    return session.scalar(statement) is not None


def by_name(session: Session, table: type[Row], limit: int, after: str | None) -> Sequence[Row]:
    statement = select(table).order_by(table.name).limit(limit)
    if after is not None:
        statement = statement.where(table.name > after)
    return session.scalars(statement).all()


def add(session: Session, table: type[Row], **values: Any) -> Row | None:
    """Add a row, or return None if the name is taken."""
    return session.scalars(insert(table).values(**values).on_conflict_do_nothing().returning(table)).one_or_none()


def remove(session: Session, table: type[Row], name: str) -> str | None:
    """Remove a row, and return its digest, or None if there is none of this name."""
    return session.scalar(delete(table).where(table.name == name).returning(table.digest))
