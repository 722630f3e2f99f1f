"""Reads clients: what each did in a run, and what each has sent in the runs that are kept."""

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any, NamedTuple
from uuid import UUID

from sqlalchemy import Date, cast, func, literal_column, or_, select, tuple_
from sqlalchemy.dialects.postgresql import INTERVAL, distinct_on
from sqlalchemy.orm import Session

from fedssl.protocol.states import AssignmentState, RoundState, RunState
from fedssl_coordinator.core.models import Artifact, Assignment, Client, Event, Round, Run, Upload
from fedssl_coordinator.dashboard.run.queries import Attempt
from fedssl_coordinator.federation.rounds.repository import LIVE
from fedssl_coordinator.federation.rounds.unseen import SEEN_SECONDS


class Member(NamedTuple):
    """One client's part in a run, counted over its attempts."""

    client_id: str
    accepted: int
    expired: int
    rejected: int
    declined: int
    last_round: int
    median_seconds: float | None
    num_bytes: int
    images_per_second: float | None
    """The median over accepted updates, for one local epoch; transfers count as work."""


class Sent(NamedTuple):
    """A client's uploads in one run."""

    run: Run
    num_bytes: int
    uploads: int
    accepted: int
    ended: int
    median_seconds: float | None


class Sending(NamedTuple):
    """One artifact that a client has sent."""

    at: datetime
    run_id: UUID
    run_name: str
    method: str
    round_number: int
    num_bytes: int
    digest: str
    state: str
    reason: str | None


_ENDED = (AssignmentState.ACCEPTED, AssignmentState.EXPIRED, AssignmentState.REJECTED, AssignmentState.DECLINED)
_took = func.extract("epoch", Assignment.closed_at - Assignment.leased_at)
_median = (
    func.percentile_cont(0.5).within_group(_took).filter(Assignment.state == AssignmentState.ACCEPTED).label("median")
)
_speed = (
    func.percentile_cont(0.5)
    .within_group(Assignment.num_examples / func.nullif(_took, 0))
    .filter(Assignment.state == AssignmentState.ACCEPTED)
)


def rounds_before(session: Session, run_id: UUID, last: int, limit: int) -> Sequence[Round]:
    """Return a run's rounds up to `last`, newest first."""
    statement = select(Round).where(Round.run_id == run_id, Round.number <= last).order_by(Round.number.desc())
    return session.scalars(statement.limit(limit)).all()


def attempts_after(session: Session, run_id: UUID, number: int, after: tuple[str, int], limit: int) -> list[Attempt]:
    """Return the clients' attempts in one round after the one at `after`, by name and attempt."""
    key = (Assignment.client_id, Assignment.attempt)
    columns = [getattr(Assignment, name) for name in Attempt._fields if name != "num_bytes"]
    statement = (
        select(*columns, Artifact.num_bytes)
        .join(Round, Round.id == Assignment.round_id)
        .outerjoin(Artifact, Artifact.digest == Assignment.update_digest)
        .where(Round.run_id == run_id, Round.number == number, tuple_(*key) > after)
        .order_by(*key)
        .limit(limit)
    )
    return [Attempt._make(row) for row in session.execute(statement)]


def members_after(session: Session, run_id: UUID, after: str, limit: int) -> list[Member]:
    """Return each client's part in a run, by name."""
    states = (AssignmentState.ACCEPTED, AssignmentState.EXPIRED, AssignmentState.REJECTED, AssignmentState.DECLINED)
    statement = (
        select(
            Assignment.client_id,
            *(func.count().filter(Assignment.state == state) for state in states),
            func.max(Assignment.round_number),
            _median,
            func.coalesce(func.sum(Artifact.num_bytes), 0),
            _speed,
        )
        .outerjoin(Artifact, Artifact.digest == Assignment.update_digest)
        .where(Assignment.run_id == run_id, Assignment.client_id > after)
        .group_by(Assignment.client_id)
        .order_by(Assignment.client_id)
        .limit(limit)
    )
    return [Member._make(row) for row in session.execute(statement)]


def last_events(session: Session, run_id: UUID, client_ids: Sequence[str], limit: int) -> dict[str, list[Event]]:
    """Return the newest events of the run about each of these clients, at most `limit` each, newest first."""
    place = func.row_number().over(partition_by=Event.client_id, order_by=Event.id.desc()).label("place")
    numbered = select(Event.id, place).where(Event.run_id == run_id, Event.client_id.in_(client_ids)).subquery()
    newest = select(numbered.c.id).where(numbered.c.place <= limit)
    found: dict[str, list[Event]] = {}
    for row in session.scalars(select(Event).where(Event.id.in_(newest)).order_by(Event.id.desc())):
        if row.client_id is not None:
            found.setdefault(row.client_id, []).append(row)
    return found


def resources(session: Session, run_id: UUID, client_ids: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return what each of these clients' workers last reported, in this run, to use of its machine."""
    statement = (
        select(Assignment.client_id, Assignment.resources)
        .where(Assignment.run_id == run_id, Assignment.client_id.in_(client_ids), Assignment.resources.is_not(None))
        .ext(distinct_on(Assignment.client_id))
        .order_by(Assignment.client_id, Assignment.round_number.desc(), Assignment.attempt.desc())
    )
    return {client: held for client, held in session.execute(statement) if held is not None}


def display_names(session: Session, client_ids: Sequence[str]) -> dict[str, str]:
    """Return the display names of those clients that have one."""
    statement = select(Client.id, Client.display_name).where(Client.id.in_(client_ids), Client.display_name != "")
    return {row.id: row.display_name for row in session.execute(statement)}


def devices(session: Session, names: Sequence[str]) -> dict[str, str | None]:
    """Return the device that each of these clients' workers has declared."""
    rows = session.execute(select(Client.id, Client.device).where(Client.id.in_(names)))
    return {row.id: row.device for row in rows}


class Known(NamedTuple):
    """A client in the list."""

    client: Client
    is_online: bool
    run_id: UUID | None
    run_name: str | None
    round_number: int | None


def clients(
    session: Session, *, after: str = "", text: str = "", only: str | None = None, limit: int = 1
) -> list[Known]:
    """Return the clients whose names contain `text`, by name, with the work that each has leased."""
    work = (
        select(Assignment.client_id, Run.id, Run.name, Assignment.round_number)
        .join(Run, Run.id == Assignment.run_id)
        .join(Round, Round.id == Assignment.round_id)
        .where(
            Assignment.state == AssignmentState.LEASED,
            Assignment.lease_expires_at > func.now(),
            Round.state == RoundState.OPEN,
            Run.state != RunState.FINISHED,
        )
        .ext(distinct_on(Assignment.client_id))
        .order_by(Assignment.client_id, Assignment.leased_at)
        .subquery()
    )
    online = or_(Client.last_seen_at > func.now() - timedelta(seconds=SEEN_SECONDS), work.c.id.is_not(None))
    statement = (
        select(
            Client,
            func.coalesce(online, False) & Client.revoked_at.is_(None),
            work.c.id,
            work.c.name,
            work.c.round_number,
        )
        .outerjoin(work, work.c.client_id == Client.id)
        .where(Client.id > after)
        .order_by(Client.id)
        .limit(limit)
    )
    if only is not None:
        statement = statement.where(Client.id == only)
    if text:
        names = func.lower(Client.id + " " + Client.display_name)
        statement = statement.where(names.contains(text.lower(), autoescape=True))
    return [Known(*row) for row in session.execute(statement)]


def sent_by_client(session: Session, client_ids: Sequence[str]) -> dict[str, tuple[int, int]]:
    """Return per client the number of artifacts it sent in the runs that are kept, and their bytes."""
    statement = (
        select(Assignment.client_id, func.count(), func.sum(Artifact.num_bytes))
        .select_from(Upload)
        .join(Assignment, Assignment.id == Upload.assignment_id)
        .join(Artifact, Artifact.digest == Upload.digest)
        .where(Assignment.client_id.in_(client_ids))
        .group_by(Assignment.client_id)
    )
    return {client: (count, int(total)) for client, count, total in session.execute(statement)}


def sent_by_run(session: Session, client_id: str, limit: int) -> list[Sent]:
    """Return a client's uploads per run, newest first."""
    sent = (
        select(Assignment.run_id, func.sum(Artifact.num_bytes).label("bytes"), func.count().label("uploads"))
        .select_from(Upload)
        .join(Assignment, Assignment.id == Upload.assignment_id)
        .join(Artifact, Artifact.digest == Upload.digest)
        .where(Assignment.client_id == client_id)
        .group_by(Assignment.run_id)
        .subquery()
    )
    part = (
        select(
            Assignment.run_id,
            func.count().filter(Assignment.state == AssignmentState.ACCEPTED).label("accepted"),
            func.count().filter(Assignment.state.in_(_ENDED)).label("ended"),
            _median,
        )
        .where(Assignment.client_id == client_id)
        .group_by(Assignment.run_id)
        .subquery()
    )
    statement = (
        select(
            Run,
            func.coalesce(sent.c.bytes, 0),
            func.coalesce(sent.c.uploads, 0),
            part.c.accepted,
            part.c.ended,
            part.c.median,
        )
        .join(part, part.c.run_id == Run.id)
        .outerjoin(sent, sent.c.run_id == Run.id)
        .order_by(Run.created_at.desc())
        .limit(limit)
    )
    return [Sent(run, int(total), *others) for run, total, *others in session.execute(statement)]


def num_runs(session: Session, client_id: str) -> int:
    """Return the number of runs, of those that are kept, in which a client has had a part."""
    statement = select(func.count(Assignment.run_id.distinct())).where(Assignment.client_id == client_id)
    return session.scalar(statement) or 0


def outcomes_of(session: Session, client_id: str, run_ids: Sequence[UUID], last: int) -> dict[UUID, list[str]]:
    """Return the states of a client's newest attempts in each run, oldest first, at most `last` rounds."""
    newest = (
        select(
            Assignment.run_id,
            Assignment.round_number,
            Assignment.state,
            func.row_number()
            .over(partition_by=Assignment.run_id, order_by=(Assignment.round_number.desc(), Assignment.attempt.desc()))
            .label("back"),
        )
        .where(Assignment.client_id == client_id, Assignment.run_id.in_(run_ids))
        .subquery()
    )
    statement = (
        select(newest.c.run_id, newest.c.state)
        .where(newest.c.back <= last)
        .order_by(newest.c.run_id, newest.c.back.desc())
    )
    found: dict[UUID, list[str]] = {run_id: [] for run_id in run_ids}
    for run_id, state in session.execute(statement):
        found[run_id].append(state)
    return found


def bytes_by_day(session: Session, client_id: str, num_days: int) -> list[tuple[str, int]]:
    """Return the bytes that a client sent on each of the last days, UTC, including days without any."""
    day = cast(func.timezone("UTC", Upload.created_at), Date)
    sent = (
        select(day.label("day"), func.sum(Artifact.num_bytes).label("bytes"))
        .join(Assignment, Assignment.id == Upload.assignment_id)
        .join(Artifact, Artifact.digest == Upload.digest)
        .where(Assignment.client_id == client_id, Upload.created_at > func.now() - timedelta(days=num_days))
        .group_by(day)
        .subquery()
    )
    today = cast(func.timezone("UTC", func.now()), Date)
    days = select(
        cast(
            func.generate_series(today - (num_days - 1), today, cast(literal_column("'1 day'"), INTERVAL)), Date
        ).label("day")
    ).subquery()
    statement = select(days.c.day, func.coalesce(sent.c.bytes, 0)).outerjoin(sent, sent.c.day == days.c.day)
    return [(str(at), int(total)) for at, total in session.execute(statement.order_by(days.c.day))]


def sendings(session: Session, client_id: str, limit: int, before: datetime | None) -> list[Sending]:
    """Return a client's uploads, newest first."""
    statement = (
        select(
            Upload.created_at,
            Run.id,
            Run.name,
            Run.method,
            Assignment.round_number,
            Artifact.num_bytes,
            Upload.digest,
            Assignment.state,
            Assignment.reason,
        )
        .join(Assignment, Assignment.id == Upload.assignment_id)
        .join(Artifact, Artifact.digest == Upload.digest)
        .join(Run, Run.id == Assignment.run_id)
        .where(Assignment.client_id == client_id)
        .order_by(Upload.created_at.desc())
        .limit(limit)
    )
    if before is not None:
        statement = statement.where(Upload.created_at < before)
    return [Sending(*row) for row in session.execute(statement)]


def live_parts(session: Session, client_id: str) -> list[tuple[Run, int]]:
    """Return a client's unfinished work: the run and the round's number."""
    statement = (
        select(Run, Assignment.round_number)
        .join(Run, Run.id == Assignment.run_id)
        .where(Assignment.client_id == client_id, Assignment.state.in_(LIVE), Run.state != RunState.FINISHED)
        .order_by(Run.created_at)
    )
    return [(run, number) for run, number in session.execute(statement)]
