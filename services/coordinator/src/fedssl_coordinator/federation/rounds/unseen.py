"""Clients that a round waits for and that have not been seen for a while, as the reason why a run stalls.

Derived when a run is shown, because a client that is absent writes nothing.
"""

from collections.abc import Sequence
from datetime import timedelta
from uuid import UUID

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from fedssl.protocol.states import RoundState, RunState
from fedssl_coordinator.core.db import among_named
from fedssl_coordinator.core.models import Assignment, Client, Round, Run
from fedssl_coordinator.federation.rounds.fitness import shortened
from fedssl_coordinator.federation.rounds.repository import LIVE

SEEN_SECONDS = 90
"""A worker sends a request more often than this, unless it holds a lease, whose heartbeats show that it is alive."""

_was_seen = func.coalesce(Client.last_seen_at > func.now() - timedelta(seconds=SEEN_SECONDS), False)
_is_leased = func.coalesce(Assignment.lease_expires_at > func.now(), False)
_UNSEEN = (
    select(Assignment.run_id, func.array_agg(Assignment.client_id))
    .join(Round, Round.id == Assignment.round_id)
    .join(Client, Client.id == Assignment.client_id)
    .where(among_named(Round.run_id, "runs"), Round.state == RoundState.OPEN, Assignment.state.in_(LIVE))
    .group_by(Assignment.run_id)
    .having(~func.bool_or(_was_seen | _is_leased))
)
"""Finds those of the `runs` whose open round waits only for clients that have not been seen, with these clients."""


def reasons(session: Session, runs: Sequence[Run]) -> dict[UUID, str]:
    """Return why running runs stall whose round waits only for clients that have not been seen."""
    running = [run.id for run in runs if run.state == RunState.RUNNING]
    if not running:  # most runs that are shown have finished
        return {}
    why = f"not seen for more than {SEEN_SECONDS} s"
    return {
        run_id: f"waiting for clients: {shortened(dict.fromkeys(sorted(clients), why))}"
        for run_id, clients in session.execute(_UNSEEN, {"runs": running})
    }
