"""Reads and writes rounds and assignments."""

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any
from uuid import UUID

from sqlalchemy import Interval, Uuid, bindparam, func, insert, or_, select, tuple_
from sqlalchemy.dialects.postgresql import distinct_on
from sqlalchemy.orm import Session, aliased

from fedssl.protocol.states import WITHOUT_WEIGHTS, AssignmentState, Cause, RoundState, RunState, Verdict
from fedssl_coordinator.core.db import among, from_now
from fedssl_coordinator.core.models import (
    Assignment,
    Client,
    DistillationJob,
    Event,
    Round,
    Run,
    SecureMember,
    SecureRound,
    table_of,
)
from fedssl_coordinator.core.statements import Statement
from fedssl_coordinator.federation.jobs.repository import UNFINISHED
from fedssl_coordinator.federation.retries import due

LIVE = (AssignmentState.OFFERED, AssignmentState.LEASED, AssignmentState.SUBMITTED)

_lost = or_(
    (Assignment.state == AssignmentState.LEASED) & (Assignment.lease_expires_at <= func.now()),
    Assignment.state.in_(LIVE) & Client.revoked_at.is_not(None),
)
"""An SQL expression: the assignment is lost, because its lease has run out or its client was revoked."""


_has_enough = Round.num_wanted <= (
    select(func.count())
    .where(Assignment.round_id == Round.id, Assignment.state == AssignmentState.ACCEPTED)
    .correlate(Round)
    .scalar_subquery()
)


_later = aliased(Assignment)
_claim = (
    (Assignment.state == AssignmentState.DECLINED)
    & (Assignment.cause == Cause.COORDINATOR)
    & ~select(_later.id)
    .where(
        _later.round_id == Assignment.round_id,
        _later.client_id == Assignment.client_id,
        _later.attempt > Assignment.attempt,
    )
    .exists()
)
"""An SQL expression: the client's newest assignment was declined because of the coordinator, which has not answered."""

_secure_messages = (
    ("keys", SecureMember.keys, SecureMember.round_id),  # every member
    ("shares", SecureMember.shares, SecureMember.keys),
    ("vectors", SecureMember.vectors, SecureMember.shares),
    ("confirmations", SecureMember.confirmations, SecureMember.vectors),
    ("reveals", SecureMember.reveals, SecureMember.vectors),
)
_awaited = (
    select(SecureMember.client_id)
    .join(
        Assignment,
        (Assignment.round_id == SecureMember.round_id) & (Assignment.client_id == SecureMember.client_id),
    )
    .where(
        SecureMember.round_id == SecureRound.round_id,
        Assignment.state.in_((AssignmentState.OFFERED, AssignmentState.LEASED)),
        or_(
            *(
                (SecureRound.phase == phase) & message.is_(None) & before.is_not(None)
                for phase, message, before in _secure_messages
            )
        ),
    )
    .correlate(SecureRound)
)
"""A query for the clients whose message a secure round waits for in its phase."""


def unclosed(session: Session, run_id: UUID) -> Round | None:
    """Return the round in progress. A unique index allows at most one."""
    statement = select(Round).where(Round.run_id == run_id, Round.state != RoundState.CLOSED)
    return session.scalars(statement).one_or_none()


def get_one(session: Session, round_id: UUID) -> Round:
    """Return a round that exists."""
    return session.get_one(Round, round_id)


def is_open(session: Session, round_id: UUID) -> bool:
    """Return whether a round exists and is open."""
    statement = select(Round.id).where(Round.id == round_id, Round.state == RoundState.OPEN)
    return session.scalars(statement).one_or_none() is not None


def latest(session: Session, run_id: UUID) -> Round | None:
    statement = select(Round).where(Round.run_id == run_id).order_by(Round.number.desc()).limit(1)
    return session.scalars(statement).one_or_none()


def exists(session: Session, run_id: UUID, number: int) -> bool:
    """Return whether a run has a round with this number."""
    statement = select(Round.id).where(Round.run_id == run_id, Round.number == number)
    return session.scalars(statement).one_or_none() is not None


def gave_weights(session: Session, run_id: UUID, number: int) -> bool:
    """Return whether this round exists and closed with new weights."""
    verdicts = (Verdict.AGGREGATED, Verdict.PARTIAL)
    statement = select(Round.id).where(Round.run_id == run_id, Round.number == number, Round.verdict.in_(verdicts))
    return session.scalar(statement) is not None


def num_without_weights(session: Session, run_id: UUID) -> dict[Verdict, int]:
    """Return the number of the run's rounds that closed without new weights, by verdict."""
    statement = select(Round.verdict, func.count()).where(Round.run_id == run_id, Round.verdict.in_(WITHOUT_WEIGHTS))
    found = {row.verdict: row[1] for row in session.execute(statement.group_by(Round.verdict))}
    return {verdict: found[verdict] for verdict in WITHOUT_WEIGHTS if verdict in found}


def oldest_first(session: Session, run_id: UUID, limit: int, after: int) -> Sequence[Round]:
    statement = select(Round).where(Round.run_id == run_id, Round.number > after).order_by(Round.number).limit(limit)
    return session.scalars(statement).all()


def numbers_of_assignments(session: Session, round_ids: Sequence[UUID]) -> dict[UUID, int]:
    """Return the number of assignments of each round."""
    statement = select(Assignment.round_id, func.count().label("number")).where(Assignment.round_id.in_(round_ids))
    return {row.round_id: row.number for row in session.execute(statement.group_by(Assignment.round_id))}


def open_round(
    session: Session, run: Run, broadcast: str, cohort: Sequence[str], deadline_seconds: float, num_wanted: int | None
) -> Round:
    """Add the next round, with an assignment offered to each client of the cohort. `num_wanted`: as in the table."""
    row = Round(
        run_id=run.id,
        number=run.rounds_closed + 1,
        state=RoundState.OPEN,
        broadcast=broadcast,
        model=run.model,
        num_wanted=num_wanted,
        deadline=from_now(deadline_seconds),
    )
    session.add(row)
    session.flush()
    offer(session, row, dict.fromkeys(cohort, 1))
    return row


def offer(session: Session, row: Round, attempts: Mapping[str, int], pauses: Mapping[str, float] | None = None) -> None:
    """Offer the round to clients, each with the number of its attempt, and after its pause in seconds if it has one."""
    later = pauses or {}
    about = {"run_id": row.run_id, "round_id": row.id, "round_number": row.number, "state": AssignmentState.OFFERED}
    offered_at = func.now() + bindparam("pause", type_=Interval)
    offers = [
        {**about, "client_id": client_id, "attempt": attempt, "pause": timedelta(seconds=later.get(client_id, 0))}
        for client_id, attempt in attempts.items()
    ]
    if offers:
        session.execute(insert(table_of(Assignment)).values(offered_at=offered_at), offers)


def extend(session: Session, row: Round, deadline_seconds: float, *, next_attempt: bool) -> None:
    """Set a new deadline from now on, and count an attempt if `next_attempt`. The caller holds the run's lock."""
    row.deadline = from_now(deadline_seconds)
    row.attempt += int(next_attempt)
    session.flush()


def values_of_reopened(deadline_seconds: float) -> dict[str, Any]:
    """Return the values of a closed round that is open again: its attempts and its time begin from the start."""
    return {"verdict": None, "reason": None, "closed_at": None, "attempt": 1, "deadline": from_now(deadline_seconds)}


def is_overdue(session: Session, round_id: UUID) -> bool:
    """Return whether the deadline has passed, by the database's clock, which all processes share."""
    return bool(session.scalar(select(Round.deadline <= func.now()).where(Round.id == round_id)))


def assignments(session: Session, round_ids: Sequence[UUID]) -> Sequence[Assignment]:
    """Return the rounds' assignments as they are now, even if the session has read them before."""
    statement = (
        select(Assignment)
        .where(Assignment.round_id.in_(round_ids))
        .order_by(Assignment.client_id, Assignment.attempt)
        .execution_options(populate_existing=True)
    )
    return session.scalars(statement).all()


def assignments_after(
    session: Session, run_id: UUID, number: int, after: tuple[str, int], limit: int
) -> Sequence[Assignment]:
    """Return the first assignments of a round after the client and the attempt `after`."""
    key = tuple_(Assignment.client_id, Assignment.attempt)
    statement = (
        select(Assignment)
        .join(Round, Round.id == Assignment.round_id)
        .where(Round.run_id == run_id, Round.number == number, key > after)
        .order_by(Assignment.client_id, Assignment.attempt)
        .limit(limit)
    )
    return session.scalars(statement).all()


def counts(session: Session, round_ids: Sequence[UUID]) -> dict[UUID, dict[AssignmentState, int]]:
    """Return for each round the number of its clients per state of their newest assignment."""
    newest = (
        select(Assignment.round_id, Assignment.state)
        .where(Assignment.round_id.in_(round_ids))
        .ext(distinct_on(Assignment.round_id, Assignment.client_id))
        .order_by(Assignment.round_id, Assignment.client_id, Assignment.attempt.desc())
        .subquery()
    )
    statement = select(newest.c.round_id, newest.c.state, func.count()).group_by(newest.c.round_id, newest.c.state)
    found: dict[UUID, dict[AssignmentState, int]] = {round_id: {} for round_id in round_ids}
    for round_id, state, number in session.execute(statement.order_by(newest.c.state)):
        found[round_id][AssignmentState(state)] = number
    return found


def claims(session: Session, round_id: UUID) -> Sequence[Assignment]:
    """Return the unanswered assignments that clients declined because of the coordinator."""
    return session.scalars(select(Assignment).where(Assignment.round_id == round_id, _claim)).all()


def num_claims(session: Session, round_id: UUID, client_id: str) -> int:
    """Return how many assignments of the round the client declined because of the coordinator, answered or not."""
    statement = select(func.count()).where(
        Assignment.round_id == round_id, Assignment.client_id == client_id, Assignment.cause == Cause.COORDINATOR
    )
    return session.scalar(statement) or 0


def has_live(session: Session, round_id: UUID) -> bool:
    """Return whether any client may still deliver."""
    live = select(Assignment.id).where(Assignment.round_id == round_id, Assignment.state.in_(LIVE))
    return bool(session.scalar(select(live.exists())))


def locked(session: Session, round_id: UUID) -> Round:
    """Return a round that exists, locked until the transaction ends. Lock its assignment, if any, first."""
    return session.get_one(Round, round_id, with_for_update={"key_share": True}, populate_existing=True)


def has_enough(session: Session, row: Round) -> bool:
    """Return whether a round that was offered to more clients than it needs has enough updates to close."""
    return row.num_wanted is not None and bool(session.scalar(select(_has_enough).where(Round.id == row.id)))


def has_all_or_enough(session: Session, round_id: UUID) -> bool:
    """Return whether no client can deliver any more, or the round has enough updates to close."""
    return _HAS_ALL_OR_ENOUGH.one_or_none(session, {"of": round_id}) == (True,)


def _has_all_or_enough() -> Any:
    a, r = table_of(Assignment), table_of(Round)
    live = select(a.c.id).where(a.c.round_id == r.c.id, or_(*[a.c.state == state for state in LIVE])).exists()
    accepted = select(func.count()).select_from(a).where(
        a.c.round_id == r.c.id, a.c.state == AssignmentState.ACCEPTED).correlate(r)  # fmt: skip
    enough = func.coalesce(r.c.num_wanted <= accepted.scalar_subquery(), False)
    return select(~live | enough).where(r.c.id == bindparam("of", type_=Uuid))


_HAS_ALL_OR_ENOUGH = Statement(_has_all_or_enough())  # each update sends it


def locked_live(
    session: Session, *, round_id: UUID | None = None, client_id: str | None = None, also: AssignmentState | None = None
) -> Sequence[Assignment]:
    """Return the live assignments of a round or of a client, and those in the state `also`, locked until the
    transaction ends."""
    states = LIVE if also is None else (*LIVE, also)
    statement = select(Assignment).where(Assignment.state.in_(states)).order_by(Assignment.client_id, Assignment.id)
    if round_id is not None:
        statement = statement.where(Assignment.round_id == round_id)
    if client_id is not None:
        statement = statement.where(Assignment.client_id == client_id)
    locking = statement.with_for_update(key_share=True).execution_options(populate_existing=True)
    return session.scalars(locking).all()


def lost(session: Session, round_id: UUID) -> Sequence[tuple[Assignment, bool]]:
    """Return the lost assignments of a round, locked, each with whether its client was revoked.

    Rows that another transaction has locked are left for the next time.
    """
    statement = (
        select(Assignment, Client.revoked_at.is_not(None))
        .join(Client, Client.id == Assignment.client_id)
        .where(Assignment.round_id == round_id, _lost)
        .order_by(Assignment.client_id)
        .with_for_update(of=Assignment, key_share=True, skip_locked=True)
        .execution_options(populate_existing=True)
    )
    return [(assignment, is_revoked) for assignment, is_revoked in session.execute(statement)]


def needing_attention(session: Session) -> Sequence[UUID]:
    """Return the running runs that an aggregator should check: the query behind the sweep.

    These are runs that are not prepared, that have no round in progress or one that can move, a lost lease, the updates
    that an over-sampled round needs, work that was declined because of the coordinator, or a phase of a secure round
    whose time is over or whose messages have all arrived. It leaves out runs whose clients are training, runs with a
    distillation job, and runs that pause after a failed computation.
    """
    in_progress = (
        select(Assignment.id)
        .join(Round, Round.id == Assignment.round_id)
        .where(
            Round.run_id == Run.id,
            Round.state == RoundState.OPEN,
            Round.deadline > func.now(),
            Assignment.state.in_(LIVE),
        )
    )
    lost_ = (
        select(Assignment.id)
        .join(Client, Client.id == Assignment.client_id)
        .join(Round, Round.id == Assignment.round_id)
        .where(Round.run_id == Run.id, Round.state == RoundState.OPEN, _lost)
    )
    enough = select(Round.id).where(Round.run_id == Run.id, Round.state == RoundState.OPEN, _has_enough)
    claimed = (
        select(Assignment.id)
        .join(Round, Round.id == Assignment.round_id)
        .where(Round.run_id == Run.id, Round.state == RoundState.OPEN, _claim)
    )
    late = (
        select(SecureRound.round_id)
        .join(Round, Round.id == SecureRound.round_id)
        .where(Round.run_id == Run.id, Round.state == RoundState.OPEN, SecureRound.deadline <= func.now())
    )
    answered = (
        select(SecureRound.round_id)
        .join(Round, Round.id == SecureRound.round_id)
        .where(Round.run_id == Run.id, Round.state == RoundState.OPEN, ~_awaited.exists())
    )
    distilling = select(DistillationJob.id).where(
        DistillationJob.run_id == Run.id, DistillationJob.state.in_(UNFINISHED)
    )
    attention = (lost_, enough, claimed, late, answered)
    statement = (
        select(Run.id)
        .where(Run.state == RunState.RUNNING, due(Run))
        .where(or_(~(in_progress.exists() | distilling.exists()), *(reason.exists() for reason in attention)))
        .order_by(Run.created_at)
    )
    return session.scalars(statement).all()


def unusual_before(session: Session, row: Round) -> list[str]:
    """Return the clients whose update was unusual in the last round before this one that gave new weights."""
    earlier = select(func.max(Round.number)).where(
        Round.run_id == row.run_id,
        Round.number < row.number,
        Round.verdict.in_((Verdict.AGGREGATED, Verdict.PARTIAL)),
    )
    statement = select(Event.client_id).where(
        Event.run_id == row.run_id, Event.round_number == earlier.scalar_subquery(), Event.kind == "update.unusual"
    )
    return sorted({str(client) for client in session.scalars(statement)})


def numbers_of_examples(
    session: Session, run_id: UUID, first: int, end: int, client_ids: Sequence[str]
) -> Sequence[tuple[str, int, int]]:
    """Return client, round and `num_examples` of the accepted updates of some clients, from `first` to before `end`."""
    statement = select(Assignment.client_id, Assignment.round_number, Assignment.num_examples).where(
        Assignment.run_id == run_id,
        Assignment.state == AssignmentState.ACCEPTED,
        Assignment.round_number >= first,
        Assignment.round_number < end,
        among(Assignment.client_id, client_ids),
    )
    return [(client, number, count or 0) for client, number, count in session.execute(statement)]
