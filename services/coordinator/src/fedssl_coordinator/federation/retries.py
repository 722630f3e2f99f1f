"""Computations that may fail for a temporary reason: when each is retried, and which failures are events.

A run's row counts the tries of its aggregations, a job's row those of the job. The pauses between tries double, and a
failure is an event only when the number of tries has doubled: a lasting failure is visible without flooding the log.
"""

from types import MappingProxyType
from typing import Any

from sqlalchemy import ColumnElement, func, or_, select
from sqlalchemy.orm import InstrumentedAttribute, Session

from fedssl.backoff import delay_seconds
from fedssl_coordinator.core import enqueue
from fedssl_coordinator.core.audit import record
from fedssl_coordinator.core.db import from_now
from fedssl_coordinator.core.models import DistillationJob, Evaluation, Job, Run
from fedssl_coordinator.core.problems import printable
from fedssl_coordinator.federation.transitions import about

Row = Run | Job

EVENTS: MappingProxyType[type[Row], str] = MappingProxyType(
    {Run: "run.stalled", DistillationJob: "distillation.stalled", Evaluation: "evaluation.stalled"}
)
"""The type of the event that reports a failure."""

MOST_DEATHS = 5
"""After this many tries in a row that ended their process, a computation is quarantined until it is requested again.

After a failure that is recorded, for example because a store does not answer, it is retried indefinitely.
"""

NO_TRIES: MappingProxyType[str, Any] = MappingProxyType({"num_tries": 0, "num_deaths": 0, "retry_at": None})
"""The values of a row whose computation has not been tried yet."""

PROGRESS: MappingProxyType[str, Any] = MappingProxyType(
    {"num_tries": 1, "num_deaths": 0, "retry_at": None, "reason": None}
)
"""The values of a row whose computation has come further than any earlier try, so the earlier failures are over."""

LONGEST_PAUSE_SECONDS = 300
"""No pause is longer. A moment that lies further ahead was written before the database's clock was set back."""


def is_over(moment: ColumnElement[Any] | InstrumentedAttribute[Any]) -> ColumnElement[bool]:
    """Return an SQL expression that is true if a pause until this moment is over.

    It is if the moment has come, or lies beyond the longest pause.
    """
    return or_(moment <= func.now(), moment > from_now(LONGEST_PAUSE_SECONDS))


def due(table: type[Row]) -> ColumnElement[bool]:
    """Return an SQL expression that is true if the pause after the last failure is over."""
    return or_(table.retry_at.is_(None), is_over(table.retry_at))


def may_begin(session: Session, row: Row) -> bool:
    """Return whether the computation may be tried now, by the database's clock."""
    if row.retry_at is None:
        return True
    table = type(row)
    return bool(session.scalar(select(due(table)).where(table.id == row.id)))


def begin(session: Session, row: Row) -> None:
    """Count a try before it begins. A try that ends its process, out of memory for example, counts too."""
    if row.num_deaths or (row.num_tries and row.reason is None):  # the second: it had made progress before it died
        row.reason = (
            "the aggregator ended while it computed (killed, or out of memory), or lost its connection to Postgres; "
            "tried again"
        )
        _record_event(session, row)
    row.num_deaths += 1
    _count(session, row, row.num_tries + 1)


def record_failure(session: Session, row: Row, why: str, *, begun: bool = True) -> None:
    """Pause after a failed try, or, if none was `begun`, after the failure of the step that should begin one."""
    row.reason = f"{printable(why, 500)}; it is tried again"
    row.num_deaths = 0
    _count(session, row, max(row.num_tries + (not begun), 1))
    _record_event(session, row)


def reset(session: Session, row: Row) -> None:
    """Forget the failures: the next try may begin at once."""
    row.num_tries, row.retry_at, row.num_deaths = 0, None, 0
    session.flush()


def is_quarantined(row: Row) -> bool:
    """Return whether so many tries in a row have ended their process that another one would probably do so too."""
    return row.num_deaths >= MOST_DEATHS


def quarantine_reason(row: Row, what: str) -> str:
    """Return why a quarantined computation is not tried again. `what` names it."""
    return (
        f"{what} was given up: {row.num_deaths} tries in a row ended before they could record an error, so their "
        "process was killed or out of memory, or lost its connection to Postgres; give it more memory or look at its "
        "log"
    )


def is_reported(num_tries: int) -> bool:
    """Return whether the failure of this try is an event: that of the first, second, fourth, eighth, ... is.

    >>> [tries for tries in range(1, 20) if is_reported(tries)]
    [1, 2, 4, 8, 16]
    """
    return num_tries & (num_tries - 1) == 0


def _count(session: Session, row: Row, num_tries: int) -> None:
    row.num_tries = num_tries
    row.retry_at = from_now(delay_seconds(num_tries, 2.0, LONGEST_PAUSE_SECONDS))
    session.flush()


def _record_event(session: Session, row: Row) -> None:
    if is_reported(row.num_tries):
        message = f"try {row.num_tries}: {row.reason}"
        record(session, EVENTS[type(row)], message, **about(row, {"num_tries": row.num_tries}))
        enqueue.wake_watchers(session)
