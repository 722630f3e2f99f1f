"""Reads and writes the metrics of rounds."""

import math
from collections.abc import Mapping, Sequence
from uuid import UUID

from sqlalchemy import delete, func, select
from sqlalchemy.dialects import postgresql
from sqlalchemy.orm import Session

from fedssl_coordinator.core.db import among
from fedssl_coordinator.core.models import Metric

_is_finite = func.abs(Metric.value) < math.inf
"""An SQL expression: the metric is a finite number, as JSON requires.

Others are not stored any more, but older versions stored some. In Postgres NaN is the largest number.
"""


def replace(session: Session, run_id: UUID, round_number: int, client_id: str | None, values: dict[str, float]) -> None:
    """Set the finite metrics of one client in a round, or of the whole round if `client_id` is None."""
    session.execute(
        delete(Metric).where(
            Metric.run_id == run_id,
            Metric.round_number == round_number,
            Metric.client_id.is_not_distinct_from(client_id),
        )
    )
    insert(session, run_id, round_number, client_id, values)


def insert(session: Session, run_id: UUID, round_number: int, client_id: str | None, values: dict[str, float]) -> None:
    """Set the finite metrics of one client, or of the whole round, if there are none yet."""
    rows = [
        {"run_id": run_id, "round_number": round_number, "client_id": client_id, "name": name, "value": value}
        for name, value in sorted(values.items())
        if math.isfinite(value)
    ]
    if rows:
        session.execute(postgresql.insert(Metric), rows)


def add(
    session: Session,
    run_id: UUID,
    round_number: int,
    names: Sequence[str],
    by_client: Mapping[str, Mapping[str, float]],
) -> None:
    """Set the metrics `names` of several clients to their finite values, in addition to those that they sent
    themselves."""
    about = {"run_id": run_id, "round_number": round_number}
    earlier = delete(Metric).filter_by(**about).where(Metric.name.in_(names), among(Metric.client_id, list(by_client)))
    session.execute(earlier)
    rows = [
        {**about, "name": name, "client_id": client_id, "value": by_client[client_id][name]}
        for name in names
        for client_id in sorted(by_client)
        if math.isfinite(by_client[client_id].get(name, math.nan))
    ]
    if rows:
        session.execute(postgresql.insert(Metric), rows)


def oldest_first(session: Session, run_id: UUID, name: str | None, limit: int, after: int) -> Sequence[Metric]:
    """Return at most `limit` metrics of a run with an id above `after`, all of them or those of one name."""
    statement = select(Metric).where(Metric.run_id == run_id, Metric.id > after, _is_finite)
    statement = statement.order_by(Metric.id).limit(limit)
    if name is not None:
        statement = statement.where(Metric.name == name)
    return session.scalars(statement).all()


def of_clients(session: Session, run_id: UUID, round_number: int, name: str) -> dict[str, float]:
    """Return one metric of every client in a round."""
    statement = select(Metric.client_id, Metric.value).where(
        Metric.run_id == run_id,
        Metric.round_number == round_number,
        Metric.name == name,
        Metric.client_id.is_not(None),
        _is_finite,
    )
    return {client_id: value for client_id, value in session.execute(statement) if client_id is not None}


def between(
    session: Session, run_id: UUID, first: int, end: int, names: Sequence[str], client_ids: Sequence[str]
) -> Sequence[tuple[str, int, str, float]]:
    """Return client, round, name and value of some metrics of some clients, from round `first` to before `end`."""
    statement = select(Metric.client_id, Metric.round_number, Metric.name, Metric.value).where(
        Metric.run_id == run_id,
        Metric.name.in_(names),
        Metric.round_number >= first,
        Metric.round_number < end,
        among(Metric.client_id, client_ids),
        _is_finite,
    )
    return [(str(client), number, name, value) for client, number, name, value in session.execute(statement)]


def by_client(
    session: Session, run_id: UUID, round_number: int, client_ids: Sequence[str]
) -> dict[str, dict[str, float]]:
    """Return all metrics of some clients in a round."""
    statement = select(Metric.client_id, Metric.name, Metric.value).where(
        Metric.run_id == run_id, Metric.round_number == round_number, Metric.client_id.in_(client_ids)
    )
    found: dict[str, dict[str, float]] = {client_id: {} for client_id in client_ids}
    for client_id, name, value in session.execute(statement):
        assert client_id is not None, "it is one of `client_ids`"
        found[client_id][name] = value
    return found
