"""Reads and writes rounds and assignments."""

from collections.abc import Sequence
from datetime import timedelta
from uuid import UUID

from sqlalchemy import delete, func, select, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.orm import Session

from fedssl.protocol.states import AssignmentState, RoundState, RunState
from fedssl_coordinator.models import Assignment, Metric, Round, Run
from fedssl_coordinator.transitions import transition

LIVE = (AssignmentState.OFFERED, AssignmentState.LEASED, AssignmentState.SUBMITTED)


def unclosed(session: Session, run_id: UUID) -> Round | None:
    """The round in progress: a unique index makes it one at most."""
    statement = select(Round).where(Round.run_id == run_id, Round.state != RoundState.CLOSED)
    return session.scalars(statement).one_or_none()


def latest(session: Session, run_id: UUID) -> Round | None:
    statement = select(Round).where(Round.run_id == run_id).order_by(Round.number.desc()).limit(1)
    return session.scalars(statement).one_or_none()


def oldest_first(session: Session, run_id: UUID, limit: int, after: int) -> Sequence[Round]:
    statement = select(Round).where(Round.run_id == run_id, Round.number > after).order_by(Round.number).limit(limit)
    return session.scalars(statement).all()


def open_round(session: Session, run: Run, broadcast: str, cohort: Sequence[str], deadline_seconds: float) -> Round:
    """The next round, with an assignment offered to everyone in the cohort."""
    row = Round(
        run_id=run.id,
        number=run.rounds_closed + 1,
        state=RoundState.OPEN,
        broadcast=broadcast,
        deadline=func.now() + timedelta(seconds=deadline_seconds),
    )
    session.add(row)
    session.flush()
    for client_id in cohort:
        offer(session, row, client_id, attempt=1)
    return row


def offer(session: Session, row: Round, client_id: str, attempt: int) -> None:
    session.add(
        Assignment(
            run_id=row.run_id,
            round_id=row.id,
            round_number=row.number,
            client_id=client_id,
            attempt=attempt,
            state=AssignmentState.OFFERED,
        )
    )
    session.flush()


def extend(session: Session, round_id: UUID, deadline_seconds: float, *, next_attempt: bool) -> None:
    """A new deadline from now on, and the next attempt where asked for."""
    session.execute(
        update(Round)
        .where(Round.id == round_id)
        .values(deadline=func.now() + timedelta(seconds=deadline_seconds), attempt=Round.attempt + int(next_attempt))
        .execution_options(synchronize_session=False)
    )
    session.expire_all()


def is_overdue(session: Session, round_id: UUID) -> bool:
    """By the database's clock, the one that everybody shares."""
    return bool(session.scalar(select(Round.deadline <= func.now()).where(Round.id == round_id)))


def assignments(session: Session, round_ids: Sequence[UUID]) -> Sequence[Assignment]:
    statement = (
        select(Assignment).where(Assignment.round_id.in_(round_ids)).order_by(Assignment.client_id, Assignment.attempt)
    )
    return session.scalars(statement).all()


def live_assignments_of_client(session: Session, client_id: str) -> Sequence[Assignment]:
    statement = select(Assignment).where(Assignment.client_id == client_id, Assignment.state.in_(LIVE))
    return session.scalars(statement).all()


def end_assignment(session: Session, assignment: Assignment, state: AssignmentState, reason: str) -> bool:
    """Close a live assignment as `state`. False: it had already moved on."""
    return transition(
        session,
        Assignment,
        assignment.id,
        AssignmentState(assignment.state),
        state,
        reason=reason,
        closed_at=func.now(),
    )


def lapsed(session: Session, run_id: UUID) -> Sequence[Assignment]:
    """Assignments of a run whose lease has run out; rows that somebody is working on are left for the next time."""
    statement = (
        select(Assignment)
        .where(
            Assignment.run_id == run_id,
            Assignment.state == AssignmentState.LEASED,
            Assignment.lease_expires_at <= func.now(),
        )
        .order_by(Assignment.id)
        .with_for_update(skip_locked=True)
    )
    return session.scalars(statement).all()


def needing_attention(session: Session) -> Sequence[UUID]:
    """Running runs that an aggregator should look at: not prepared, no round, a round that can move, a lapsed lease.

    The query behind the sweep. Runs whose clients are busily training are not in it.
    """
    open_round_ = select(Round.id).where(
        Round.run_id == Run.id, Round.state == RoundState.OPEN, Round.deadline > func.now()
    )
    busy = (
        select(Assignment.id)
        .join(Round, Round.id == Assignment.round_id)
        .where(Assignment.run_id == Run.id, Round.state == RoundState.OPEN, Assignment.state.in_(LIVE))
    )
    lapsed_ = select(Assignment.id).where(
        Assignment.run_id == Run.id,
        Assignment.state == AssignmentState.LEASED,
        Assignment.lease_expires_at <= func.now(),
    )
    statement = (
        select(Run.id)
        .where(Run.state == RunState.RUNNING)
        .where(~(open_round_.exists() & busy.exists()) | lapsed_.exists())
        .order_by(Run.created_at)
    )
    return session.scalars(statement).all()


def replace_metrics(
    session: Session, run_id: UUID, round_number: int, client_id: str | None, values: dict[str, float]
) -> None:
    """Set a round's numbers of one client (None: of the whole round)."""
    session.execute(
        delete(Metric).where(
            Metric.run_id == run_id,
            Metric.round_number == round_number,
            Metric.client_id.is_not_distinct_from(client_id),
        )
    )
    if values:
        rows = [
            {"run_id": run_id, "round_number": round_number, "client_id": client_id, "name": name, "value": value}
            for name, value in sorted(values.items())
        ]
        session.execute(insert(Metric), rows)


def metrics(session: Session, run_id: UUID, name: str | None, limit: int, after: int) -> Sequence[Metric]:
    statement = select(Metric).where(Metric.run_id == run_id, Metric.id > after).order_by(Metric.id).limit(limit)
    if name is not None:
        statement = statement.where(Metric.name == name)
    return session.scalars(statement).all()


def client_metrics(session: Session, run_id: UUID, round_number: int, name: str) -> dict[str, float]:
    """One number of every client in a round."""
    statement = select(Metric.client_id, Metric.value).where(
        Metric.run_id == run_id,
        Metric.round_number == round_number,
        Metric.name == name,
        Metric.client_id.is_not(None),
    )
    return {client_id: value for client_id, value in session.execute(statement) if client_id is not None}
