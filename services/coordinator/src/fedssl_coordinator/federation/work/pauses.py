"""How long a client without work waits before it claims again: until the next round of its runs is expected.

A claim that is held open costs a connection, and is repeated every `FEDSSL_CLAIM_WAIT_SECONDS`. Most clients of a large
federation are not drawn, and during a round there is nothing for them to do.
"""

import random
from typing import Any

from sqlalchemy import Double, bindparam, cast, extract, func, or_, select
from sqlalchemy.orm import Session

from fedssl.protocol.states import AssignmentState, RoundState, RunState
from fedssl.protocol.work import LONGEST_PAUSE_SECONDS
from fedssl_coordinator.core.models import Assignment, Client, Round, Run, table_of

_LAST_ROUNDS = 5
_OVERDUE_SHARE = 0.125
"""A round that takes longer than the last ones is expected to take this share of its time so far in addition. So a
client joins the round after it late by at most this share of its length."""

_SHORTEST_SECONDS = 10.0
"""If the next round is expected earlier, the client waits for it: several short pauses cost more than one long poll."""

_SPREAD = 0.25
"""Clients come back within this share of the pause before its end, so that they do not all come at once."""


def pause_seconds(session: Session, client_id: str) -> int:
    """Return after how many seconds a client without work claims again, or 0 if it waits for work.

    The pause is spread at random. A client waits for work if it has an offer that begins later, or if the next round of
    one of its runs may be opened at any moment: no round is open, or the open one is expected to end soon.
    """
    rows = session.execute(_ROUNDS, {"claimant": client_id}).all()
    if not rows or any(elapsed is None for elapsed, _ in rows):
        return 0
    return spread(min(expected_seconds(elapsed, typical) for elapsed, typical in rows), random.random())


def expected_seconds(elapsed: float, typical: float | None) -> float:
    """Return how long an open round is expected to take from now on. Times are in seconds.

    `typical` is the median length of the last rounds, or None in the first round.

    >>> expected_seconds(10, 60), expected_seconds(80, 60), expected_seconds(16, None)
    (50, 10.0, 2.0)
    """
    age = max(0.0, elapsed)  # it is negative if the database's clock was set back
    return max((typical or 0) - age, age * _OVERDUE_SHARE)


def spread(seconds: float, share: float) -> int:
    """Return a pause in whole seconds of at most `seconds`, a `share` (0 to 1) of the spread before its end.

    Returns 0 if that is too short for a pause.

    >>> spread(40, 0), spread(40, 1), spread(1000, 0), spread(9.9, 0)
    (40, 30, 60, 0)
    """
    if seconds < _SHORTEST_SECONDS:
        return 0
    return int(min(seconds, LONGEST_PAUSE_SECONDS) * (1 - _SPREAD * share))


def _rounds() -> Any:
    """Build the query for the running runs in which a client takes part: the age of the open round, and the median
    length of the last ones, in seconds."""
    run, current, client = table_of(Run), table_of(Round), table_of(Client)
    earlier = current.alias("earlier")
    seconds = cast(extract("epoch", earlier.c.closed_at - earlier.c.opened_at), Double).label("seconds")
    last = select(seconds).where(earlier.c.run_id == run.c.id, earlier.c.state == RoundState.CLOSED)
    lengths = last.order_by(earlier.c.number.desc()).limit(_LAST_ROUNDS).correlate(run).lateral("lengths")
    typical = select(func.percentile_cont(0.5).within_group(lengths.c.seconds)).scalar_subquery()
    named = run.c.spec["cohort"]["clients"]
    offers = table_of(Assignment)  # one that begins later, because the client has declined
    is_offered = (offers.c.client_id == client.c.id) & (offers.c.state == AssignmentState.OFFERED)
    is_open = (current.c.run_id == run.c.id) & (current.c.state != RoundState.CLOSED)
    elapsed = cast(extract("epoch", func.now() - current.c.opened_at), Double)
    return (
        select(elapsed, typical)
        .select_from(client.join(run, run.c.project == client.c.project).outerjoin(current, is_open))
        .where(
            client.c.id == bindparam("claimant"),
            run.c.state == RunState.RUNNING,
            ~select(offers.c.id).where(is_offered).correlate(client).exists(),
            or_(func.jsonb_typeof(named) == "null", named.has_key(client.c.id)),
        )
    )


_ROUNDS = _rounds()  # each claim without work executes it
