"""Reads and writes leases."""

from collections.abc import Sequence
from datetime import timedelta
from uuid import UUID

from sqlalchemy import func, select, update
from sqlalchemy.orm import Session

from fedssl.protocol.states import AssignmentState, RoundState, RunState, Verdict
from fedssl.protocol.work import Progress
from fedssl_coordinator.core.db import among
from fedssl_coordinator.core.models import Assignment, Round, Run
from fedssl_coordinator.federation.retries import is_over

_is_open = (
    Assignment.state.in_((AssignmentState.LEASED, AssignmentState.OFFERED))
    & is_over(Assignment.offered_at)
    & (Run.state == RunState.RUNNING)
    & (Round.state == RoundState.OPEN)
)
"""Of an assignment with its run and its round: whether its client can work on it now."""


def claimable(session: Session, client_id: str) -> Assignment | None:
    """The assignment that this client should work on now, locked: its own lease first, then the oldest offer."""
    statement = (
        select(Assignment)
        .join(Run, Run.id == Assignment.run_id)
        .join(Round, Round.id == Assignment.round_id)
        .where(Assignment.client_id == client_id, _is_open)
        .order_by(Assignment.state != AssignmentState.LEASED, Assignment.offered_at, Assignment.id)
        .limit(1)
        .with_for_update(of=Assignment, key_share=True, skip_locked=True)
    )
    return session.scalars(statement).one_or_none()


def with_work(session: Session, client_ids: Sequence[str]) -> set[str]:
    """Those of the clients that would be given an assignment, unless somebody else were quicker."""
    statement = (
        select(Assignment.client_id)
        .join(Run, Run.id == Assignment.run_id)
        .join(Round, Round.id == Assignment.round_id)
        .where(among(Assignment.client_id, client_ids), _is_open)
        .distinct()
    )
    return set(session.scalars(statement))


def end_pauses(session: Session, client_id: str) -> None:
    """What is to be offered to the client later is offered now."""
    paused = (Assignment.client_id == client_id) & (Assignment.state == AssignmentState.OFFERED)
    statement = update(Assignment).where(paused, Assignment.offered_at > func.now()).values(offered_at=func.now())
    session.execute(statement, execution_options={"synchronize_session": False})


def locked(session: Session, assignment_id: UUID) -> Assignment | None:
    """The assignment, locked until the transaction ends."""
    return session.get(Assignment, assignment_id, with_for_update={"key_share": True}, populate_existing=True)


def lease_end(seconds: float) -> object:
    """An SQL expression: so many seconds from now, by the database's clock."""
    return func.now() + timedelta(seconds=seconds)


def renew(session: Session, assignment_id: UUID, seconds: float, progress: Progress | None) -> bool:
    """Prolong a lease and keep the progress. False: there is none to prolong."""
    values: dict[str, object] = {"lease_expires_at": lease_end(seconds)}
    if progress is not None:
        values["progress"] = progress.model_dump(mode="json")
    statement = (
        update(Assignment)
        .where(Assignment.id == assignment_id, Assignment.state == AssignmentState.LEASED)
        .values(**values)
        .returning(Assignment.id)
        .execution_options(synchronize_session=False)
    )
    return session.execute(statement).scalar_one_or_none() is not None


def finished_with(session: Session, client_id: str, run_ids: Sequence[UUID]) -> Sequence[UUID]:
    """Those of the runs that have finished, sent something, and had this client."""
    took_part = select(Assignment.id).where(Assignment.run_id == Run.id, Assignment.client_id == client_id)
    statement = select(Run.id).where(
        Run.id.in_(run_ids),
        Run.state == RunState.FINISHED,
        func.jsonb_array_length(Run.plan["update"]) > 0,
        took_part.exists(),
    )
    return session.scalars(statement).all()


def newest_accepted(session: Session, run_id: UUID, client_id: str) -> Assignment | None:
    """Not of a skipped round: nobody's update is in the weights, so nobody's state moves on."""
    statement = (
        select(Assignment)
        .join(Round, Round.id == Assignment.round_id)
        .where(
            Assignment.run_id == run_id,
            Assignment.client_id == client_id,
            Assignment.state == AssignmentState.ACCEPTED,
            Round.verdict.is_distinct_from(Verdict.SKIPPED),
        )
        .order_by(Assignment.round_number.desc())
        .limit(1)
    )
    return session.scalars(statement).one_or_none()
