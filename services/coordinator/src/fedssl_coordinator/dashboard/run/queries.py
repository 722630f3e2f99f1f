"""Reads what a run's page shows: aggregated in Postgres, and cut to what a chart can draw."""

from collections.abc import Sequence
from datetime import datetime
from typing import Any, NamedTuple
from uuid import UUID

from sqlalchemy import case, func, literal, or_, select
from sqlalchemy.dialects.postgresql import distinct_on
from sqlalchemy.orm import Session

from fedssl.protocol.measures import MEASURES
from fedssl.protocol.states import AssignmentState
from fedssl_coordinator.core.db import among
from fedssl_coordinator.core.models import (
    Artifact,
    Assignment,
    Client,
    DistillationJob,
    Evaluation,
    Event,
    Metric,
    Round,
    Run,
)
from fedssl_coordinator.federation.jobs.repository import UNFINISHED

LETTERS = {
    AssignmentState.ACCEPTED: "a",
    AssignmentState.EXPIRED: "e",
    AssignmentState.REJECTED: "r",
    AssignmentState.DECLINED: "d",
    AssignmentState.OFFERED: "o",
    AssignmentState.LEASED: "l",
    AssignmentState.SUBMITTED: "l",
}
"""A client's part in a round as one letter."""
_MOST_KEPT_WEIGHTS = 100


class Attempt(NamedTuple):
    """One attempt of one client in one round."""

    round_number: int
    client_id: str
    attempt: int
    state: str
    reason: str | None
    cause: str | None
    progress: dict[str, Any] | None
    resources: dict[str, Any] | None
    num_examples: int | None
    offered_at: datetime
    leased_at: datetime | None
    closed_at: datetime | None
    lease_expires_at: datetime | None
    num_bytes: int | None


def client_ids(session: Session, run_id: UUID) -> list[str]:
    """Return the names of all clients that have had a part in the run, sorted.

    It goes from name to name in an index, so its time grows with the number of clients and not with that of rounds.
    """
    least = select(func.min(Assignment.client_id).label("name")).where(Assignment.run_id == run_id)
    names = least.cte("names", recursive=True)
    following = least.where(Assignment.client_id > names.c.name).correlate(names).scalar_subquery()
    names = names.union_all(select(following).where(names.c.name.is_not(None)))
    return sorted(session.scalars(select(names.c.name).where(names.c.name.is_not(None))))


def presence(session: Session, names: Sequence[str]) -> dict[str, tuple[datetime | None, datetime | None]]:
    """Return when each of these clients was last seen, and when it was revoked."""
    rows = session.execute(select(Client.id, Client.last_seen_at, Client.revoked_at).where(among(Client.id, names)))
    return {name: (seen_at, revoked_at) for name, seen_at, revoked_at in rows}


def metric_names(session: Session, run_id: UUID, number: int) -> list[str]:
    """Return the names of the metrics that clients sent in a round."""
    statement = (
        select(Metric.name)
        .where(Metric.run_id == run_id, Metric.round_number == number, Metric.client_id.is_not(None))
        .where(Metric.name.not_in(MEASURES))  # the coordinator's own
        .distinct()
    )
    return sorted(session.scalars(statement))


def of_clients(
    session: Session, run_id: UUID, name: str, numbers: Sequence[int], clients: Sequence[str]
) -> list[tuple[int, str, float]]:
    """Return one metric of some clients in some rounds. Uses an index and does not scan the whole run."""
    statement = select(Metric.round_number, Metric.client_id, Metric.value).where(
        Metric.run_id == run_id,
        Metric.round_number.in_(numbers),
        Metric.client_id.in_(clients),
        Metric.name == name,
    )
    return [(number, client, value) for number, client, value in session.execute(statement) if client is not None]


def of_rounds(session: Session, run_id: UUID, name: str, numbers: Sequence[int]) -> list[tuple[int, float | None]]:
    """Return a metric of whole rounds, oldest first."""
    statement = select(Metric.round_number, Metric.value).where(
        Metric.run_id == run_id, Metric.name == name, Metric.client_id.is_(None), Metric.round_number.in_(numbers)
    )
    return [(number, value) for number, value in session.execute(statement.order_by(Metric.round_number))]


def band(session: Session, run_id: UUID, name: str, numbers: Sequence[int]) -> list[tuple[int, float, float, float]]:
    """Return per round the median of one metric over the clients, and its 10th and 90th percentiles."""
    at = [func.percentile_cont(share).within_group(Metric.value) for share in (0.5, 0.1, 0.9)]
    statement = (
        select(Metric.round_number, *at)
        .where(
            Metric.run_id == run_id,
            Metric.name == name,
            Metric.client_id.is_not(None),
            Metric.round_number.in_(numbers),
        )
        .group_by(Metric.round_number)
        .order_by(Metric.round_number)
    )
    return [(row[0], row[1], row[2], row[3]) for row in session.execute(statement)]


def verdicts(session: Session, run_id: UUID) -> list[tuple[int, str | None]]:
    """Return the verdicts of the run's rounds, oldest first."""
    statement = select(Round.number, Round.verdict).where(Round.run_id == run_id).order_by(Round.number)
    return [(number, verdict) for number, verdict in session.execute(statement)]


def outcomes(session: Session, run_id: UUID) -> dict[str, list[tuple[int, str]]]:
    """Return per client its rounds, each with the outcome of its newest attempt as one letter."""
    letter = case(LETTERS, value=Assignment.state, else_="?")
    newest = (
        select(Assignment.client_id, Assignment.round_number, letter.label("letter"))
        .where(Assignment.run_id == run_id)
        .ext(distinct_on(Assignment.client_id, Assignment.round_number))
        .order_by(Assignment.client_id, Assignment.round_number, Assignment.attempt.desc())
        .subquery()
    )
    statement = select(
        newest.c.client_id,
        func.array_agg(newest.c.round_number),
        func.string_agg(newest.c.letter, literal("")),
    ).group_by(newest.c.client_id)
    return {client: list(zip(numbers, letters, strict=True)) for client, numbers, letters in session.execute(statement)}


def attempts(
    session: Session, run_id: UUID, first: int, last: int, clients: Sequence[str] | None = None
) -> list[Attempt]:
    """Return every attempt in some rounds, by round, client and attempt."""
    statement = (
        select(
            Assignment.round_number,
            Assignment.client_id,
            Assignment.attempt,
            Assignment.state,
            Assignment.reason,
            Assignment.cause,
            Assignment.progress,
            Assignment.resources,
            Assignment.num_examples,
            Assignment.offered_at,
            Assignment.leased_at,
            Assignment.closed_at,
            Assignment.lease_expires_at,
            Artifact.num_bytes,
        )
        .outerjoin(Artifact, Artifact.digest == Assignment.update_digest)
        .join(Round, Round.id == Assignment.round_id)
        .where(Round.run_id == run_id, Round.number.between(first, last))
        .order_by(Assignment.round_number, Assignment.client_id, Assignment.attempt)
    )
    if clients is not None:
        statement = statement.where(Assignment.client_id.in_(clients))
    return [Attempt._make(row) for row in session.execute(statement)]


def rounds_between(session: Session, run_id: UUID, first: int, last: int) -> Sequence[Round]:
    statement = select(Round).where(Round.run_id == run_id, Round.number.between(first, last)).order_by(Round.number)
    return session.scalars(statement).all()


def bytes_by_round(session: Session, run_id: UUID) -> dict[int, int]:
    """Return the bytes of the updates accepted in each round."""
    statement = (
        select(Assignment.round_number, func.sum(Artifact.num_bytes))
        .join(Artifact, Artifact.digest == Assignment.update_digest)
        .where(Assignment.run_id == run_id, Assignment.state == AssignmentState.ACCEPTED)
        .group_by(Assignment.round_number)
    )
    return {number: int(total) for number, total in session.execute(statement)}


def closing_times(session: Session, run_id: UUID) -> dict[int, datetime]:
    """Return when each closed round was closed."""
    statement = select(Round.number, Round.closed_at).where(Round.run_id == run_id, Round.closed_at.is_not(None))
    return {number: at for number, at in session.execute(statement) if at is not None}


def distillations(session: Session, run_id: UUID, limit: int) -> Sequence[DistillationJob]:
    """Return the run's jobs, newest first."""
    job = DistillationJob
    statement = select(job).where(job.run_id == run_id).order_by(job.created_at.desc(), job.id.desc())
    return session.scalars(statement.limit(limit)).all()


def num_distillations(session: Session, run_id: UUID) -> int:
    statement = select(func.count()).select_from(DistillationJob).where(DistillationJob.run_id == run_id)
    return session.scalar(statement) or 0


def distillations_between(session: Session, run_id: UUID, first: int, last: int) -> Sequence[DistillationJob]:
    """Return the jobs of some rounds, by round."""
    job = DistillationJob
    statement = select(job).where(job.run_id == run_id, job.round_number.between(first, last))
    return session.scalars(statement.order_by(job.round_number, job.created_at)).all()


def is_judged(session: Session, run_id: UUID) -> bool:
    """Return whether an evaluation of the run is unfinished."""
    unfinished = select(Evaluation.id).where(Evaluation.run_id == run_id, Evaluation.state.in_(UNFINISHED))
    return bool(session.scalar(select(unfinished.exists())))


def now(session: Session) -> datetime:
    """Return the time by Postgres's clock, which all other times come from."""
    return session.execute(select(func.now())).scalar_one()


class KeptWeights(NamedTuple):
    """Weights that a round sent to its clients, which the store still has."""

    after_round: int
    digest: str
    num_bytes: int
    at: datetime


def kept_weights(session: Session, run_id: UUID) -> list[KeptWeights]:
    """Return the weights with which the newest rounds began, newest first."""
    statement = (
        select(Round.number - 1, Artifact.digest, Artifact.num_bytes, Round.opened_at)
        .join(Artifact, Artifact.digest == func.coalesce(Round.model, Round.broadcast))
        .where(Round.run_id == run_id, Round.number > 1, Artifact.collected_at.is_(None))
        .order_by(Round.number.desc())
        .limit(_MOST_KEPT_WEIGHTS)
    )
    return [KeptWeights(*row) for row in session.execute(statement)]


def has_weights(session: Session, run_id: UUID, digest: str) -> bool:
    """Return whether these are weights that the run began with, has now, or sent in a round."""
    named = (Run.initial_broadcast, Run.broadcast, Run.initial_model, Run.model)
    own = select(Run.id).where(Run.id == run_id, or_(*(column == digest for column in named)))
    sent = select(Round.id).where(Round.run_id == run_id, or_(Round.broadcast == digest, Round.model == digest))
    return bool(session.scalar(select(own.exists() | sent.exists())))


def sizes(session: Session, digests: Sequence[str]) -> dict[str, int]:
    """Return the bytes of those of these artifacts that the store still has."""
    statement = select(Artifact.digest, Artifact.num_bytes).where(Artifact.digest.in_(digests))
    found = session.execute(statement.where(Artifact.collected_at.is_(None)))
    return {row.digest: row.num_bytes for row in found}


def evaluations(session: Session, run_id: UUID, limit: int) -> Sequence[Evaluation]:
    """Return the run's evaluations, newest first."""
    statement = select(Evaluation).where(Evaluation.run_id == run_id).order_by(Evaluation.created_at.desc())
    return session.scalars(statement.limit(limit)).all()


class Mapped(NamedTuple):
    """An evaluation that has kept a map, and what makes it comparable with others."""

    id: UUID
    round_number: int
    dataset: str
    config: dict[str, Any]


def mapped(session: Session, run_id: UUID) -> list[Mapped]:
    """Return the rounds with a map of the same kind as the newest one, oldest first."""
    statement = (
        select(Evaluation.id, Evaluation.round_number, Evaluation.dataset, Evaluation.config)
        .where(Evaluation.run_id == run_id, Evaluation.embedding_map.is_not(None))
        .order_by(Evaluation.round_number, Evaluation.created_at)
    )
    rows = [Mapped._make(row) for row in session.execute(statement)]
    return [row for row in rows if (row.dataset, row.config) == (rows[-1].dataset, rows[-1].config)]


def newest_events(
    session: Session, run_id: UUID | None, limit: int, *, before: int | None = None, but: Sequence[str] = ()
) -> Sequence[Event]:
    """Return the events of one run or of all, newest first, without those of the kinds `but`."""
    statement = select(Event).order_by(Event.id.desc()).limit(limit)
    if run_id is not None:
        statement = statement.where(Event.run_id == run_id)
    if before is not None:
        statement = statement.where(Event.id < before)
    if but:
        statement = statement.where(Event.kind.not_in(but))
    return session.scalars(statement).all()


def last_event_id(session: Session, run_id: UUID) -> int:
    return session.scalar(select(func.max(Event.id)).where(Event.run_id == run_id)) or 0
