"""Reads and writes dimension assignments."""

from collections import defaultdict
from collections.abc import Sequence
from uuid import UUID

from sqlalchemy import select
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.orm import Session

from fedssl_coordinator.core.models import DimensionAssignment


def by_client(session: Session, run_id: UUID) -> dict[str, tuple[int, ...]]:
    """Return every client's dimensions in a run, sorted, with the clients in the order of their names."""
    statement = (
        select(DimensionAssignment.client_id, DimensionAssignment.dimension)
        .where(DimensionAssignment.run_id == run_id)
        .order_by(DimensionAssignment.client_id, DimensionAssignment.dimension)
    )
    found: defaultdict[str, list[int]] = defaultdict(list)
    for client_id, dimension in session.execute(statement):
        found[client_id].append(dimension)
    return {client_id: tuple(dimensions) for client_id, dimensions in found.items()}


def of_client(session: Session, run_id: UUID, client_id: str) -> tuple[int, ...] | None:
    """Return one client's dimensions, sorted, or None if it has none."""
    statement = (
        select(DimensionAssignment.dimension)
        .where(DimensionAssignment.run_id == run_id, DimensionAssignment.client_id == client_id)
        .order_by(DimensionAssignment.dimension)
    )
    return tuple(session.scalars(statement)) or None


def add(session: Session, run_id: UUID, client_id: str, dimensions: Sequence[int]) -> None:
    """Assign dimensions to a client. The primary key (run, dimension) refuses one that another client owns."""
    session.execute(
        insert(DimensionAssignment),
        [{"run_id": run_id, "dimension": dimension, "client_id": client_id} for dimension in dimensions],
    )
