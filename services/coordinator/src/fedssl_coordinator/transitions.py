"""Which state may follow which, and the one way to change a state.

A change is a conditional UPDATE that says whether this caller made it, with its event in the same transaction.
"""

from enum import StrEnum
from types import MappingProxyType
from typing import Any
from uuid import UUID

from sqlalchemy import update
from sqlalchemy.orm import Session

from fedssl.protocol.states import AssignmentState as A
from fedssl.protocol.states import RoundState as R
from fedssl.protocol.states import RunState as S
from fedssl_coordinator.models import Assignment, Round, Run

TRANSITIONS: MappingProxyType[type, frozenset[tuple[StrEnum, StrEnum]]] = MappingProxyType(
    {
        Run: frozenset(
            {
                (S.CREATED, S.RUNNING),
                (S.RUNNING, S.PAUSED),
                (S.PAUSED, S.RUNNING),
                (S.CREATED, S.FINISHED),
                (S.RUNNING, S.FINISHED),
                (S.PAUSED, S.FINISHED),
            }
        ),
        Round: frozenset(
            {
                (R.OPEN, R.AGGREGATING),
                (R.AGGREGATING, R.DISTILLING),
                (R.OPEN, R.CLOSED),
                (R.AGGREGATING, R.CLOSED),
                (R.DISTILLING, R.CLOSED),
            }
        ),
        Assignment: frozenset(
            {
                (A.OFFERED, A.LEASED),
                (A.OFFERED, A.EXPIRED),
                (A.OFFERED, A.DECLINED),
                (A.LEASED, A.SUBMITTED),
                (A.LEASED, A.EXPIRED),
                (A.LEASED, A.DECLINED),
                (A.SUBMITTED, A.ACCEPTED),
                (A.SUBMITTED, A.REJECTED),
                (A.SUBMITTED, A.EXPIRED),
            }
        ),
    }
)


class IllegalTransition(AssertionError):
    """A mistake in the code: the change is not in TRANSITIONS."""


def transition(
    session: Session,
    table: type[Run] | type[Round] | type[Assignment],
    row_id: UUID,
    before: StrEnum,
    after: StrEnum,
    **values: Any,
) -> bool:
    """Move one row from `before` to `after`, setting `values` too. False: somebody else was first, nothing changed."""
    if (before, after) not in TRANSITIONS[table]:
        raise IllegalTransition(f"{table.__tablename__}: {before} -> {after}")
    statement = (
        update(table)
        .where(table.id == row_id, table.state == before)
        .values(state=after, **values)
        .returning(table.id)
        .execution_options(synchronize_session=False, populate_existing=True)
    )
    won = session.execute(statement).scalar_one_or_none() is not None
    if won:
        session.expire_all()
    return won
