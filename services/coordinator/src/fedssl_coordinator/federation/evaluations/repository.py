"""Reads and writes evaluations."""

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any
from uuid import UUID

from sqlalchemy import func, select, tuple_
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.orm import Session

from fedssl.protocol.states import JobState
from fedssl_coordinator.core.models import Evaluation, Metric

_KEY = ("run_id", "round_number", "dataset_digest", "config")
_METRIC_KEY = ("run_id", "round_number", "client_id", "name")


def in_order(
    session: Session, run_id: UUID, limit: int, after: tuple[int, datetime, UUID] | None
) -> Sequence[Evaluation]:
    """Return a run's evaluations by round, and within a round in the order of the requests."""
    key = (Evaluation.round_number, Evaluation.created_at, Evaluation.id)
    statement = select(Evaluation).where(Evaluation.run_id == run_id).order_by(*key).limit(limit)
    if after is not None:
        statement = statement.where(tuple_(*key) > after)
    return session.scalars(statement).all()


def add(session: Session, **values: Any) -> tuple[Evaluation, bool]:
    """Return a new queued evaluation and True, or the same one from before as it is now, locked, and False."""
    statement = (
        insert(Evaluation)
        .values(**values, state=JobState.QUEUED, sent_at=func.now())
        .on_conflict_do_nothing(index_elements=_KEY)
        .returning(Evaluation)
    )
    if (row := session.scalars(statement).one_or_none()) is not None:
        return row, True
    same = select(Evaluation).where(*(getattr(Evaluation, name) == values[name] for name in _KEY))
    locking = same.with_for_update(key_share=True).execution_options(populate_existing=True)
    return session.scalars(locking).one(), False


def embedding_map(session: Session, evaluation_id: UUID) -> dict[str, Any] | None:
    """Return the map that an evaluation has stored, if it has one."""
    return session.scalar(select(Evaluation.embedding_map).where(Evaluation.id == evaluation_id))


def map_before(session: Session, row: Evaluation) -> dict[str, Any] | None:
    """Return the map of the newest earlier round with an equal evaluation that stored one."""
    statement = (
        select(Evaluation.embedding_map)
        .where(
            Evaluation.run_id == row.run_id,
            Evaluation.dataset_digest == row.dataset_digest,
            Evaluation.config == row.config,
            Evaluation.round_number < row.round_number,
            Evaluation.embedding_map.is_not(None),
        )
        .order_by(Evaluation.round_number.desc())
        .limit(1)
    )
    return session.scalar(statement)


def add_metrics(
    session: Session, run_id: UUID, round_number: int, values: Mapping[str, float], *, replace: bool
) -> None:
    """Add metrics of a whole round to those that it has. `replace`: overwrite a metric that exists already."""
    if not values:
        return
    statement = insert(Metric).values(
        [
            {"run_id": run_id, "round_number": round_number, "client_id": None, "name": name, "value": value}
            for name, value in sorted(values.items())
        ]
    )
    if replace:
        new = {"value": statement.excluded.value}
        session.execute(statement.on_conflict_do_update(index_elements=_METRIC_KEY, set_=new))
    else:
        session.execute(statement.on_conflict_do_nothing(index_elements=_METRIC_KEY))
