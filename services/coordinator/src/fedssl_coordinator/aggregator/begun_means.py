"""Adds the updates of an open round to their mean as they arrive, so that less is left to do when the round closes.

The mean is only in this process's memory, and nothing depends on it: the close compares which updates it has with those
that count, and starts from scratch if they are not the first ones. A process that is killed, or another one that closes
the round, therefore computes the same bits from the stored updates. See docs/adr/0012-means-begun-in-memory.md.
"""

from dataclasses import dataclass, field
from uuid import UUID

from sqlalchemy.orm import Session

from fedssl.aggregation.prefix_mean import PrefixMean
from fedssl.engine import begin_aggregation
from fedssl.methods import METHODS
from fedssl.methods.api import Context, Update
from fedssl.protocol.runs import RunSpec
from fedssl.protocol.states import AssignmentState, RoundState
from fedssl_coordinator.aggregator.updates import stored_update
from fedssl_coordinator.core.db import transaction
from fedssl_coordinator.core.models import Assignment, Round
from fedssl_coordinator.federation import run_rows
from fedssl_coordinator.federation.rounds import repository


@dataclass(slots=True)
class _BegunMean:
    round_id: UUID
    mean: PrefixMean = field(default_factory=PrefixMean)


_begun: _BegunMean | None = None  # one at most: it is twice as large as the weights


def begin_mean(run_id: UUID) -> None:
    """Add the first accepted updates of the run's open round, in client-id order, to their mean in this process.

    Does nothing while this process holds the mean of another round that is open: two runs would take turns and read
    everything again each time. Raises ArtifactError, OSError and AggregationError if an update cannot be read or added.
    """
    global _begun
    with transaction() as session:
        run, current = run_rows.get(session, run_id), repository.unclosed(session, run_id)
        if run is None or current is None or current.state != RoundState.OPEN:
            return
        if _begun is None or (_begun.round_id != current.id and not repository.is_open(session, _begun.round_id)):
            _begun = _BegunMean(current.id)
        if _begun.round_id != current.id:
            return
        updates = _first_updates(session, current)
    spec = RunSpec.model_validate(run.spec)
    ctx = Context(spec=spec, round_number=current.number, prefix_mean=_begun.mean)
    begin_aggregation(METHODS[spec.method.name], updates, ctx)


def take_mean(round_id: UUID) -> PrefixMean:
    """Return what this process has of the round's mean, and forget it."""
    global _begun
    found = _begun
    if found is None or found.round_id != round_id:
        return PrefixMean()
    _begun = None
    return found.mean


def _first_updates(session: Session, current: Round) -> list[Update]:
    """Return the updates before which none can come any more, in client-id order."""
    newest: dict[str, Assignment] = {row.client_id: row for row in repository.assignments(session, [current.id])}
    first = []
    for client_id in sorted(newest):
        if newest[client_id].state != AssignmentState.ACCEPTED:
            break
        first.append(stored_update(newest[client_id]))
    return first
