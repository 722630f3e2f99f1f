"""Which state may follow which, and the one way to change a state.

A change is a conditional UPDATE that says whether this caller made it, with its event in the same transaction.
"""

from types import MappingProxyType
from typing import Any

from sqlalchemy import update
from sqlalchemy.orm import Session

from fedssl.protocol.states import AssignmentState as A
from fedssl.protocol.states import RoundState as R
from fedssl.protocol.states import RunState as S
from fedssl_coordinator.events.repository import record
from fedssl_coordinator.models import Assignment, Round, Run

Row = Run | Round | Assignment
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
    }
)
"""The three machines: each legal change, and the kind of the event that tells of it."""


class IllegalTransition(AssertionError):
    """A mistake in the code: the change is not in TRANSITIONS."""


def transition(
    session: Session, row: Row, after: S | R | A, message: str, *, data: dict[str, Any] | None = None, **values: Any
) -> bool:
    """Move a row from the state in which the caller saw it to `after`, setting `values` too, with an event.

    False: somebody else had moved it, and nothing has changed. Either way the row is read anew when it is next looked
    at. Raises IllegalTransition.
    """
    table = type(row)
    kind = TRANSITIONS[table].get((row.state, after))
    if kind is None:
        raise IllegalTransition(f"{table.__tablename__}: {row.state} -> {after}")
    about = _about(row)
    details = {**({"assignment": str(row.id)} if isinstance(row, Assignment) else {}), **(data or {})}
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
        record(session, kind, message, **about, data=details)
    return won


def _about(row: Row) -> dict[str, Any]:
    """What the event is about."""
    if isinstance(row, Run):
        return {"run_id": row.id}
    if isinstance(row, Round):
        return {"run_id": row.run_id, "round_number": row.number}
    return {"run_id": row.run_id, "round_number": row.round_number, "client_id": row.client_id}
