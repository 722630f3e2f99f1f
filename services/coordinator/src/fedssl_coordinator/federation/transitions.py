"""Which state may follow which, and the one way to change a state.

A change is a conditional UPDATE that says whether this caller made it, with its event in the same transaction.
"""

from types import MappingProxyType
from typing import Any

from sqlalchemy import update
from sqlalchemy.orm import Session

from fedssl.protocol.states import AssignmentState as A
from fedssl.protocol.states import JobState as J
from fedssl.protocol.states import RoundState as R
from fedssl.protocol.states import RunState as S
from fedssl_coordinator.core.audit import record
from fedssl_coordinator.core.models import Assignment, DistillationJob, Evaluation, Round, Run

Row = Run | Round | Assignment | DistillationJob | Evaluation
Changes = MappingProxyType[tuple[str, str], str]

TRANSITIONS: MappingProxyType[type[Row], Changes] = MappingProxyType(
    {
        Run: MappingProxyType(
            {
                (S.CREATED, S.RUNNING): "run.started",
                (S.RUNNING, S.PAUSED): "run.paused",
                (S.PAUSED, S.RUNNING): "run.resumed",
                (S.CREATED, S.FINISHED): "run.finished",
                (S.RUNNING, S.FINISHED): "run.finished",
                (S.PAUSED, S.FINISHED): "run.finished",
            }
        ),
        Round: MappingProxyType(
            {
                (R.OPEN, R.AGGREGATING): "round.aggregating",
                (R.AGGREGATING, R.DISTILLING): "round.distilling",
                (R.OPEN, R.CLOSED): "round.closed",
                (R.AGGREGATING, R.CLOSED): "round.closed",
                (R.DISTILLING, R.CLOSED): "round.closed",
            }
        ),
        Assignment: MappingProxyType(
            {
                (A.OFFERED, A.LEASED): "assignment.leased",
                (A.OFFERED, A.EXPIRED): "assignment.expired",
                (A.OFFERED, A.DECLINED): "assignment.declined",
                (A.LEASED, A.SUBMITTED): "assignment.submitted",
                (A.LEASED, A.EXPIRED): "assignment.expired",
                (A.LEASED, A.DECLINED): "assignment.declined",
                (A.SUBMITTED, A.ACCEPTED): "assignment.accepted",
                (A.SUBMITTED, A.REJECTED): "assignment.rejected",
                (A.SUBMITTED, A.EXPIRED): "assignment.expired",
            }
        ),
        DistillationJob: MappingProxyType(
            {
                (J.QUEUED, J.RUNNING): "distillation.started",
                (J.QUEUED, J.CANCELLED): "distillation.cancelled",
                (J.RUNNING, J.COMPLETED): "distillation.completed",
                (J.RUNNING, J.FAILED): "distillation.failed",
                (J.RUNNING, J.CANCELLED): "distillation.cancelled",
            }
        ),
        Evaluation: MappingProxyType(
            {
                (J.QUEUED, J.RUNNING): "evaluation.started",
                (J.QUEUED, J.CANCELLED): "evaluation.cancelled",
                (J.RUNNING, J.COMPLETED): "evaluation.completed",
                (J.RUNNING, J.FAILED): "evaluation.failed",
                (J.RUNNING, J.CANCELLED): "evaluation.cancelled",
                (J.FAILED, J.QUEUED): "evaluation.queued",
                (J.CANCELLED, J.QUEUED): "evaluation.queued",
            }
        ),
    }
)
"""The machines: each legal change, and the kind of the event that tells of it."""


class IllegalTransition(AssertionError):
    """A mistake in the code: the change is not in TRANSITIONS."""


def transition(
    session: Session, row: Row, after: S | R | A | J, message: str, *, data: dict[str, Any] | None = None, **values: Any
) -> bool:
    """Move a row from the state in which the caller saw it to `after`, setting `values` too, with an event.

    False: somebody else had moved it, and nothing has changed. Either way the row is read anew when it is next looked
    at. Raises IllegalTransition.
    """
    table = type(row)
    kind = TRANSITIONS[table].get((row.state, after))
    if kind is None:
        raise IllegalTransition(f"{table.__tablename__}: {row.state} -> {after}")
    subject = about(row, data)
    statement = (
        update(table)
        .where(table.id == row.id, table.state == row.state)
        .values(state=after, **values)
        .returning(table.id)
        .execution_options(synchronize_session=False)
    )
    won = session.execute(statement).scalar_one_or_none() is not None
    if row in session:
        session.expire(row)
    if won:
        record(session, kind, message, **subject)
    return won


def about(row: Row, data: dict[str, Any] | None = None) -> dict[str, Any]:
    """What an event of this row is about, as `record` takes it: its run and round, and what names the row itself."""
    if isinstance(row, Run):
        return {"run_id": row.id, "data": data}
    if isinstance(row, Round):
        return {"run_id": row.run_id, "round_number": row.number, "data": data}
    subject = {"run_id": row.run_id, "round_number": row.round_number}
    if isinstance(row, Assignment):
        return {**subject, "client_id": row.client_id, "data": {"assignment": str(row.id), **(data or {})}}
    name = "evaluation" if isinstance(row, Evaluation) else "job"
    return {**subject, "data": {name: str(row.id), **(data or {})}}
