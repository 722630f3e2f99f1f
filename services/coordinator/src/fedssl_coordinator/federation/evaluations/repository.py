"""Reads and writes evaluations."""

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any
from uuid import UUID

from sqlalchemy import Text, cast, func, literal, select, tuple_, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.orm import Session

from fedssl.protocol.states import JobState
from fedssl_coordinator.core.db import is_held
from fedssl_coordinator.core.models import Evaluation, Metric
from fedssl_coordinator.federation.retries import due, take_untold

LOCK = "evaluation/"  # and the evaluation's id: what the process that works on it holds
UNFINISHED = (JobState.QUEUED, JobState.RUNNING)
_KEY = ("run_id", "round_number", "dataset_digest", "config")
_METRIC_KEY = ("run_id", "round_number", "client_id", "name")


def get(session: Session, evaluation_id: UUID) -> Evaluation | None:
    """The evaluation as it is now."""
    return session.get(Evaluation, evaluation_id, populate_existing=True)


def locked(session: Session, evaluation_id: UUID) -> Evaluation | None:
    """The evaluation as it is now, which nobody else can move until the transaction ends."""
    return session.get(Evaluation, evaluation_id, with_for_update={"key_share": True}, populate_existing=True)


def in_order(
    session: Session, run_id: UUID, limit: int, after: tuple[int, datetime, UUID] | None
) -> Sequence[Evaluation]:
    """By round, and in a round as they were asked for."""
    key = (Evaluation.round_number, Evaluation.created_at, Evaluation.id)
    statement = select(Evaluation).where(Evaluation.run_id == run_id).order_by(*key).limit(limit)
    if after is not None:
        statement = statement.where(tuple_(*key) > tuple_(*map(literal, after)))
    return session.scalars(statement).all()


def add(session: Session, **values: Any) -> tuple[Evaluation, bool]:
    """A queued evaluation; False: it was there before, as it is shown."""
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


def take_waiting(session: Session, num_messages: int) -> Sequence[UUID]:
    """Evaluations that nobody works on although somebody could, noted as sent: the query behind the sweep.

    Not those whose last try has failed just now, nor those whose message waits among `num_messages` in the queue.
    Whatever becomes of the run, its evaluations are completed.
    """
    is_held_ = is_held(literal(LOCK) + cast(Evaluation.id, Text))
    waits = Evaluation.state.in_(UNFINISHED) & due(Evaluation) & ~is_held_
    return take_untold(session, Evaluation, waits, num_messages)


def embedding_map(session: Session, evaluation_id: UUID) -> dict[str, Any] | None:
    """The map that an evaluation has kept."""
    return session.scalar(select(Evaluation.embedding_map).where(Evaluation.id == evaluation_id))


def map_before(session: Session, row: Evaluation) -> dict[str, Any] | None:
    """The map of the newest round before this one's that was judged alike."""
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


def set_while_running(session: Session, evaluation_id: UUID, **values: Any) -> bool:
    """Write where an evaluation stands. False: it was called off, and nothing is written."""
    statement = (
        update(Evaluation)
        .where(Evaluation.id == evaluation_id, Evaluation.state == JobState.RUNNING)
        .values(**values)
        .returning(Evaluation.id)
        .execution_options(synchronize_session=False)
    )
    return session.execute(statement).scalar_one_or_none() is not None


def add_metrics(
    session: Session, run_id: UUID, round_number: int, values: Mapping[str, float], *, replace: bool
) -> None:
    """Numbers of a whole round, beside those that it has. `replace`: a number that is there already gives way."""
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
