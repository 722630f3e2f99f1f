"""Clients that have declined the work of a round in progress, as the reason why a run makes no progress.

Derived when a run is shown: whether it still holds changes with every claim.
"""

from collections.abc import Sequence
from uuid import UUID

from sqlalchemy import exists, select
from sqlalchemy.orm import Session, aliased

from fedssl.protocol.states import AssignmentState, RoundState, RunState
from fedssl.wording import plural
from fedssl_coordinator.core.db import among_named
from fedssl_coordinator.core.models import Assignment, Round, Run
from fedssl_coordinator.federation.rounds.fitness import shortened

_declined = aliased(Assignment)
_DECLINED = (
    select(Assignment)
    .join(Round, Round.id == Assignment.round_id)
    .where(among_named(Round.run_id, "runs"), Round.state == RoundState.OPEN)
    .where(exists().where(_declined.round_id == Round.id, _declined.state == AssignmentState.DECLINED))
    .order_by(Assignment.client_id, Assignment.attempt)
    .execution_options(populate_existing=True)
)
"""Finds the assignments of the open rounds of `runs` in which a client has declined, by client and attempt."""


def reasons(session: Session, runs: Sequence[Run]) -> dict[UUID, str]:
    """Return why a run makes no progress, for running runs whose clients have declined the current round."""
    running = [run.id for run in runs if run.state == RunState.RUNNING]
    if not running:  # most runs that are shown have finished
        return {}
    declined: dict[UUID, dict[str, str]] = {}
    members: dict[UUID, set[str]] = {}
    for row in session.scalars(_DECLINED, {"runs": running}):
        members.setdefault(row.run_id, set()).add(row.client_id)
        by_client = declined.setdefault(row.run_id, {})
        if row.state == AssignmentState.DECLINED:
            by_client[row.client_id] = row.reason or "no reason given"
        elif row.state != AssignmentState.OFFERED:  # it works again, or has delivered
            by_client.pop(row.client_id, None)
    return {
        run_id: f"{len(found)} of {plural(len(members[run_id]), 'client')} declined: {shortened(found)}"
        for run_id, found in declined.items()
        if found
    }
