"""Counts runs, rounds, assignments, jobs, notifications and clients by state, in one statement, for `/metrics`."""

from collections.abc import Sequence
from typing import Any

from sqlalchemy import ColumnElement, Select, func, literal, select, union_all
from sqlalchemy.orm import Session

from fedssl.protocol.notifications import DeliveryState
from fedssl.protocol.states import AssignmentState, JobState, RunState, Verdict
from fedssl_coordinator.core.models import (
    Assignment,
    Client,
    DistillationJob,
    Evaluation,
    NotificationDelivery,
    Round,
    Run,
)

# States without rows are listed too: alerts need series that always exist.
STATES: dict[str, Sequence[str]] = {
    "runs": [*RunState],
    "rounds": [*Verdict],
    "assignments": [*AssignmentState],
    "distillations": [*JobState],
    "evaluations": [*JobState],
    "notifications": [*DeliveryState],
    "clients": ["known"],
}


def count_by_state(session: Session) -> dict[str, dict[str, int]]:
    """Return how many of each kind there are in each of its states."""
    found = {kind: dict.fromkeys(map(str, states), 0) for kind, states in STATES.items()}
    parts = [
        _counted("runs", Run.state),
        _counted("rounds", Round.verdict).where(Round.verdict.is_not(None)),
        _counted("assignments", Assignment.state),
        _counted("distillations", DistillationJob.state),
        _counted("evaluations", Evaluation.state),
        _counted("notifications", NotificationDelivery.state),
        select(literal("clients"), literal("known"), func.count(Client.id)).where(Client.revoked_at.is_(None)),
    ]
    for row in session.execute(union_all(*parts)):
        found[row[0]][row[1]] = row[2]
    return found


def _counted(kind: str, state: Any) -> Select[str, str, int]:
    column: ColumnElement[str] = state
    return select(literal(kind), column, func.count()).group_by(column)
