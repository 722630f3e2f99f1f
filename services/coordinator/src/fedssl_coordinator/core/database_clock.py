"""The time by Postgres's clock, to which all times in its rows belong: this machine's clock may differ."""

import time
from datetime import UTC, datetime, timedelta

from sqlalchemy import func, select
from sqlalchemy.orm import Session

_EVERY_SECONDS = 10.0
_ahead = timedelta()
_compared_at = float("-inf")


def compare(session: Session) -> None:
    """Compare this machine's clock with Postgres's, if that was not done within the last ten seconds."""
    global _ahead, _compared_at
    if time.monotonic() - _compared_at >= _EVERY_SECONDS:
        _ahead = session.execute(select(func.clock_timestamp())).scalar_one() - datetime.now(UTC)
        _compared_at = time.monotonic()


def now() -> datetime:
    """Return the time by Postgres's clock, or by this machine's if `compare` was never called."""
    return datetime.now(UTC) + _ahead
