"""The assignments of a round: which ones end, and which are offered again."""

from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import func
from sqlalchemy.orm import Session

from fedssl.protocol.states import AssignmentState
from fedssl_coordinator.core import enqueue
from fedssl_coordinator.core.audit import record
from fedssl_coordinator.core.models import Assignment, Round
from fedssl_coordinator.federation.rounds import repository
from fedssl_coordinator.federation.rounds.fitness import shortened
from fedssl_coordinator.federation.transitions import transition


def end_live(session: Session, current: Round, reason: str) -> None:
    """End all live assignments of a round."""
    for assignment in repository.locked_live(session, round_id=current.id):
        expire(session, assignment, reason)


def expire(session: Session, assignment: Assignment, reason: str, consequence: str = "", **values: str | None) -> None:
    """End an assignment for a reason. `consequence` is added to the event's message only."""
    message = f"{assignment.client_id}: {reason}{consequence}"
    closed: dict[str, Any] = {"reason": reason, "closed_at": func.now(), **values}
    won = transition(session, assignment, AssignmentState.EXPIRED, message, **closed)
    assert won, "the row is locked"


def record_offers(session: Session, current: Round, why: str, reasons: Mapping[str, str]) -> None:
    """Record that a round was offered again to the clients of `reasons`, and wake workers and watchers."""
    record(
        session,
        "round.reoffered",
        f"{why}, offered again: {shortened(reasons)}",
        run_id=current.run_id,
        round_number=current.number,
        data={"clients": dict(reasons)},
    )
    enqueue.wake_workers(session)
    enqueue.wake_watchers(session)


def reasons_of(rows: Sequence[Assignment]) -> dict[str, str]:
    """Return how and why each client's newest assignment ended."""
    return {row.client_id: row.reason or str(row.state) for row in rows}
