"""Computations that may fail for a reason that passes: when each may be tried again, and what is told of it.

A run's row counts the tries of its aggregations, a job's row those of the job. The pauses between them double, and only
every doubling is an event: a lasting failure is seen without flooding the log.
"""

from datetime import timedelta
from types import MappingProxyType

from sqlalchemy import ColumnElement, func, or_, select
from sqlalchemy.orm import Session

from fedssl_coordinator import nudges
from fedssl_coordinator.events.repository import record
from fedssl_coordinator.models import DistillationJob, Evaluation, Run
from fedssl_coordinator.problems import printable
from fedssl_coordinator.transitions import about

Row = Run | DistillationJob | Evaluation

KINDS: MappingProxyType[type[Row], str] = MappingProxyType(
    {Run: "run.stalled", DistillationJob: "distillation.stalled", Evaluation: "evaluation.stalled"}
)
"""The kind of the event that tells of a failure."""

_LONGEST_PAUSE_SECONDS = 300
_RESEND_SECONDS = 10


def due(table: type[Row]) -> ColumnElement[bool]:
    """For queries: the pause after the last failure is over, or longer than any: the database's clock was put back."""
    longest = func.now() + timedelta(seconds=_LONGEST_PAUSE_SECONDS)
    return or_(table.retry_at.is_(None), table.retry_at <= func.now(), table.retry_at > longest)


def untold(table: type[DistillationJob] | type[Evaluation]) -> ColumnElement[bool]:
    """For queries: nobody was told of the job just now, by the same clock."""
    just_now = timedelta(seconds=_RESEND_SECONDS)
    return or_(table.sent_at.is_(None), ~table.sent_at.between(func.now() - just_now, func.now() + just_now))


def may_begin(session: Session, row: Row) -> bool:
    """Whether the computation may be tried now, by the database's clock."""
    table = type(row)
    return bool(session.scalar(select(due(table)).where(table.id == row.id)))


def begin(session: Session, row: Row) -> None:
    """Count a try before it is made: one that ends its process, for want of memory for example, counts too."""
    if row.num_tries and row.reason is None:
        row.reason = "the aggregator ended while it computed: killed, or out of memory; tried again"
        _tell(session, row)
    _count(session, row, row.num_tries + 1)


def note_failure(session: Session, row: Row, why: str, *, begun: bool = True) -> None:
    """The try that was begun, or the look at the row that should have begun one, has failed: pause."""
    row.reason = f"{printable(why, 500)}; it is tried again"
    _count(session, row, max(row.num_tries + (not begun), 1))
    _tell(session, row)


def start_anew(session: Session, row: Row) -> None:
    """Forget the failures: the next try may come at once."""
    row.num_tries, row.retry_at = 0, None
    session.flush()


def is_told(num_tries: int) -> bool:
    """Whether the failure of this try is an event: of the first, second, fourth, eighth ...

    >>> [tries for tries in range(1, 20) if is_told(tries)]
    [1, 2, 4, 8, 16]
    """
    return num_tries & (num_tries - 1) == 0


def _count(session: Session, row: Row, num_tries: int) -> None:
    row.num_tries = num_tries
    row.retry_at = func.now() + timedelta(seconds=min(2 ** min(num_tries, 16), _LONGEST_PAUSE_SECONDS))
    session.flush()


def _tell(session: Session, row: Row) -> None:
    if is_told(row.num_tries):
        message = f"try {row.num_tries}: {row.reason}"
        record(session, KINDS[type(row)], message, **about(row, {"num_tries": row.num_tries}))
        nudges.wake_watchers(session)
