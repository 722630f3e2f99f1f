"""Computations that may fail for a reason that passes: when each may be tried again, and what is told of it.

A run's row counts the tries of its aggregations, a job's row those of the job. The pauses between them double, and only
every doubling is an event: a lasting failure is seen without flooding the log.
"""

from collections.abc import Sequence
from datetime import datetime, timedelta
from types import MappingProxyType
from uuid import UUID

from sqlalchemy import ColumnElement, func, or_, select, update
from sqlalchemy.orm import InstrumentedAttribute, Session

from fedssl_coordinator.core import enqueue
from fedssl_coordinator.core.audit import record
from fedssl_coordinator.core.db import among
from fedssl_coordinator.core.models import DistillationJob, Evaluation, Run
from fedssl_coordinator.core.problems import printable
from fedssl_coordinator.federation.transitions import about

Job = DistillationJob | Evaluation
Row = Run | Job

KINDS: MappingProxyType[type[Row], str] = MappingProxyType(
    {Run: "run.stalled", DistillationJob: "distillation.stalled", Evaluation: "evaluation.stalled"}
)
"""The kind of the event that tells of a failure."""

LONGEST_PAUSE_SECONDS = 300
"""Nothing is put off for longer, so what is farther ahead was noted before the database's clock was put back."""

_RESEND_SECONDS = 10


def is_over(moment: InstrumentedAttribute[datetime] | InstrumentedAttribute[datetime | None]) -> ColumnElement[bool]:
    """For queries: the moment until which something is put off has come, or lies beyond the longest pause."""
    return or_(moment <= func.now(), moment > func.now() + timedelta(seconds=LONGEST_PAUSE_SECONDS))


def due(table: type[Row]) -> ColumnElement[bool]:
    """For queries: the pause after the last failure is over."""
    return or_(table.retry_at.is_(None), is_over(table.retry_at))


def take_untold(session: Session, table: type[Job], waits: ColumnElement[bool], num_messages: int) -> Sequence[UUID]:
    """Of the jobs that wait for a worker, those of which one is to be told now, noted as told.

    Each once; and anew where fewer messages are in the queue (`num_messages`) than jobs wait, for then some were lost.
    What waits there for hours, behind other jobs or for a process that serves the queue, is not sent a second time.
    """
    just_now = timedelta(seconds=_RESEND_SECONDS)
    is_new = table.sent_at.is_(None)
    was_told_before = ~table.sent_at.between(func.now() - just_now, func.now() + just_now)
    waiting = session.execute(select(table.id, is_new, was_told_before).where(waits)).all()
    are_lost = num_messages < len(waiting)
    ids = [job_id for job_id, never, before in waiting if never or (are_lost and before)]
    if ids:  # mostly there are none, and this is asked every few seconds
        statement = update(table).where(among(table.id, ids)).values(sent_at=func.now())
        session.execute(statement, execution_options={"synchronize_session": False})
    return ids


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
    row.retry_at = func.now() + timedelta(seconds=min(2 ** min(num_tries, 16), LONGEST_PAUSE_SECONDS))
    session.flush()


def _tell(session: Session, row: Row) -> None:
    if is_told(row.num_tries):
        message = f"try {row.num_tries}: {row.reason}"
        record(session, KINDS[type(row)], message, **about(row, {"num_tries": row.num_tries}))
        enqueue.wake_watchers(session)
