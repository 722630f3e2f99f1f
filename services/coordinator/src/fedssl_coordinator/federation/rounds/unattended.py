"""Runs that wait for an aggregator although none is free: none is started, or all are busy.

Derived when a run is shown: the process that would write a reason is the one that is missing.
"""

from collections.abc import Sequence
from datetime import datetime, timedelta
from uuid import UUID

from sqlalchemy import Text, cast, func, literal, select, true
from sqlalchemy.orm import Session

from fedssl.protocol.states import AssignmentState, RoundState, RunState
from fedssl_coordinator.core.db import among_named, is_held
from fedssl_coordinator.core.models import Assignment, DistillationJob, Round, Run
from fedssl_coordinator.federation.jobs.repository import UNFINISHED
from fedssl_coordinator.federation.retries import due
from fedssl_coordinator.federation.rounds.repository import LIVE

SECONDS = 30.0
"""An aggregator that is free starts on a run within a second, or at the next sweep."""

_current = select(Round).where(Round.run_id == Run.id, Round.state != RoundState.CLOSED).lateral("current")
_is_live = select(Assignment.id).where(Assignment.round_id == _current.c.id, Assignment.state.in_(LIVE)).exists()
_delivered_at = select(func.max(Assignment.closed_at)).where(
    Assignment.round_id == _current.c.id,
    Assignment.state.not_in([AssignmentState.OFFERED, AssignmentState.LEASED]),
)
_closed_at = select(func.max(Round.closed_at)).where(Round.run_id == Run.id)
_distilling = select(DistillationJob.id).where(DistillationJob.run_id == Run.id, DistillationJob.state.in_(UNFINISHED))
_WAITING = (
    select(
        Run.id, _current.c.number, _current.c.state, _current.c.deadline, _is_live, _delivered_at.scalar_subquery(),
        _closed_at.scalar_subquery(), func.now(),
    )
    .select_from(Run)
    .outerjoin(_current, true())
    .where(among_named(Run.id, "runs"), due(Run), ~_distilling.exists())
    .where(~is_held(literal("run/") + cast(Run.id, Text)))
)  # fmt: skip
"""Finds those of the `runs` that no aggregator works on, with their unclosed round, if any."""


def reasons(session: Session, runs: Sequence[Run]) -> dict[UUID, str]:
    """Return why runs make no progress, for those that only wait for an aggregator."""
    candidates = {run.id: run for run in runs if run.state == RunState.RUNNING and run.reason is None}
    if not candidates:  # most runs that are shown have finished
        return {}
    found = {}
    for run_id, number, seconds in _waiting(session, candidates):
        if seconds >= SECONDS:
            what = f"round {number}" if number else "the run"
            found[run_id] = (
                f"waiting for an aggregator: none has taken up {what} for more than {_rounded(seconds)}; start one, or "
                "look at its log: it may be busy with another run"
            )
    return found


def _rounded(seconds: float) -> str:
    """Return SECONDS, or its largest doubling that has passed, so that the reason of a run changes rarely.

    >>> [_rounded(seconds) for seconds in (31.0, 75.0, 200.0, 7200.0)]
    ['30 s', '60 s', '2 min', '64 min']
    """
    shown = SECONDS
    while 2 * shown <= seconds:
        shown *= 2
    return f"{shown:.0f} s" if shown < 120 else f"{shown / 60:.0f} min"


def _waiting(session: Session, runs: dict[UUID, Run]) -> list[tuple[UUID, int, float]]:
    """Return the runs that need an aggregator and that none works on: round, and seconds since it was needed."""
    found = []
    values = {"runs": list(runs)}
    for run_id, number, state, deadline, is_live, delivered_at, closed_at, now in session.execute(_WAITING, values):
        since = deadline if is_live else _since(runs[run_id], state, deadline, delivered_at, closed_at)
        if since is not None:
            found.append((run_id, number or 0, (now - since).total_seconds()))
    return found


def _since(
    run: Run,
    state: str | None,
    deadline: datetime | None,
    delivered_at: datetime | None,
    closed_at: datetime | None,
) -> datetime | None:
    """Return when an aggregator was first needed, if no client may deliver any more."""
    if state is None or deadline is None:
        return max(filter(None, [closed_at, run.started_at]), default=None)
    opened = deadline - timedelta(seconds=run.spec["cohort"]["deadline_seconds"])  # or when the run was resumed
    return max(filter(None, [delivered_at, opened if state == RoundState.OPEN else None]), default=None)
