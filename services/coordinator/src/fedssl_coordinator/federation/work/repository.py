"""Reads and writes leases."""

from collections.abc import Sequence
from typing import NamedTuple
from uuid import UUID

from sqlalchemy import func, or_, select, update
from sqlalchemy.orm import Session

from fedssl.protocol.ledger import SentBroadcast
from fedssl.protocol.states import AssignmentState, RoundState, RunState
from fedssl.protocol.work import Progress, Resources
from fedssl_coordinator.core.db import among
from fedssl_coordinator.core.models import Assignment, Client, Round, Run, table_of
from fedssl_coordinator.federation.retries import is_over

_assignments = table_of(Assignment).c

is_open = (
    or_(_assignments.state == AssignmentState.LEASED, _assignments.state == AssignmentState.OFFERED)
    & is_over(_assignments.offered_at)
    & (table_of(Run).c.state == RunState.RUNNING)
    & (table_of(Round).c.state == RoundState.OPEN)
)
"""An SQL expression, for assignments with their runs and rounds: the client can work on the assignment now."""


class Renewed(NamedTuple):
    """The assignment whose lease was renewed, with its run and round."""

    run_id: UUID
    round_number: int


def claimable(session: Session, client_id: str) -> tuple[Assignment, Run, Round] | None:
    """Return the client's next assignment, locked, with its run and its round.

    It is the one that the client has leased, or else the oldest offer.
    """
    statement = (
        select(Assignment, Run, Round)
        .join(Run, Run.id == Assignment.run_id)
        .join(Round, Round.id == Assignment.round_id)
        .where(Assignment.client_id == client_id, is_open)
        .order_by(Assignment.state != AssignmentState.LEASED, Assignment.offered_at, Assignment.id)
        .limit(1)
        .with_for_update(of=Assignment, key_share=True, skip_locked=True)
    )
    found = session.execute(statement).one_or_none()
    return None if found is None else (found[0], found[1], found[2])


def with_work(session: Session, client_ids: Sequence[str]) -> set[str]:
    """Return which of the clients could claim an assignment now."""
    statement = (
        select(Assignment.client_id)
        .join(Run, Run.id == Assignment.run_id)
        .join(Round, Round.id == Assignment.round_id)
        .where(among(Assignment.client_id, client_ids), is_open)
        .distinct()
    )
    return set(session.scalars(statement))


def end_pauses(session: Session, client_id: str) -> None:
    """Offer to the client now what would have been offered to it after a pause."""
    paused = (Assignment.client_id == client_id) & (Assignment.state == AssignmentState.OFFERED)
    statement = update(Assignment).where(paused, Assignment.offered_at > func.now()).values(offered_at=func.now())
    session.execute(statement, execution_options={"synchronize_session": False})


def locked(session: Session, assignment_id: UUID, client_id: str) -> tuple[Assignment, Client] | None:
    """Return the assignment, locked until the transaction ends, if it is this client's, and the client.

    Read its round afterwards: this statement would return the round as it was before the wait for the lock.
    """
    statement = (
        select(Assignment, Client)
        .join(Client, Client.id == Assignment.client_id)
        .where(Assignment.id == assignment_id, Assignment.client_id == client_id)
        .with_for_update(of=Assignment, key_share=True)
        .execution_options(populate_existing=True)
    )
    found = session.execute(statement).one_or_none()
    return None if found is None else (found[0], found[1])


def num_images(session: Session, client_id: str) -> int | None:
    """Return how many images a client registered, or None if it has not registered."""
    return session.scalar(select(Client.num_images).where(Client.id == client_id))


def renew(
    session: Session,
    assignment_id: UUID,
    client_id: str,
    progress: Progress | None = None,
    resources: Resources | None = None,
) -> Renewed | None:
    """Extend this client's lease as its run's spec sets it, and store its reports. Returns None if it is not leased."""
    seconds = func.make_interval(0, 0, 0, 0, 0, 0, Run.spec["cohort"]["lease_seconds"].as_float())
    values: dict[str, object] = {"lease_expires_at": func.now() + seconds}
    if progress is not None:
        values["progress"] = progress.model_dump(mode="json")
    if resources is not None:
        values["resources"] = resources.model_dump(mode="json")
    statement = (
        update(Assignment)
        .where(
            Assignment.id == assignment_id,
            Assignment.client_id == client_id,
            Assignment.state == AssignmentState.LEASED,
            Run.id == Assignment.run_id,
        )
        .values(**values)
        .returning(Assignment.run_id, Assignment.round_number)
        .execution_options(synchronize_session=False)
    )
    row = session.execute(statement).one_or_none()
    return None if row is None else Renewed(*row)


def finished_with(session: Session, client_id: str, run_ids: Sequence[UUID]) -> Sequence[UUID]:
    """Return which of the runs have finished, exchanged updates, and included this client."""
    took_part = select(Assignment.id).where(Assignment.run_id == Run.id, Assignment.client_id == client_id)
    statement = select(Run.id).where(
        Run.id.in_(run_ids),
        Run.state == RunState.FINISHED,
        func.jsonb_array_length(Run.plan["update"]) > 0,
        took_part.exists(),
    )
    return session.scalars(statement).all()


def set_lost_round(session: Session, assignment_id: UUID, round_number: int) -> bool:
    """Record that the client works on this without its state of an earlier round. False if it is not leased."""
    statement = (
        update(Assignment)
        .where(Assignment.id == assignment_id, Assignment.state == AssignmentState.LEASED)
        .values(lost_round=round_number)
        .returning(Assignment.id)
        .execution_options(synchronize_session=False)
    )
    return session.execute(statement).scalar_one_or_none() is not None


def sent_broadcast(session: Session, assignment_id: UUID) -> SentBroadcast:
    """Return what the client of an assignment received."""
    columns = (Round.run_id, Round.number, Round.broadcast)
    statement = select(*columns).join(Assignment, Assignment.round_id == Round.id).where(Assignment.id == assignment_id)
    run_id, number, broadcast = session.execute(statement).one()
    return SentBroadcast(run=run_id, round=number, broadcast=broadcast)
