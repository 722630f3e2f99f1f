"""Gives every client of a run dimensions of its own, from the run's seed, once and for all."""

from collections.abc import Sequence
from uuid import UUID

from sqlalchemy.orm import Session

from fedssl.dimensions import assign_dimensions, client_dimensions
from fedssl.protocol.runs import RunSpec
from fedssl_coordinator.core.audit import clients_told_of, record
from fedssl_coordinator.federation.dimensions import repository

EXHAUSTED = "dimensions.exhausted"


def owners(session: Session, run_id: UUID, spec: RunSpec, clients: Sequence[str]) -> list[str]:
    """Those of `clients` that can take part: all of them, unless the method divides the embedding and it is used up.

    The clients of the first round take the slots in name order, as in a simulation; one that joins later takes the next
    slot that is free, where `num_clients` left any; else an event says once that there is none for it. Nobody's
    dimensions change or are handed on, not even a revoked client's. Raises SpecError where the first clients are too
    many. The caller holds the run's lock, so two clients that join at once do not meet here.
    """
    wanted = spec.method.dimensions_wanted(spec.model)
    if wanted is None:
        return list(clients)
    owned = repository.by_client(session, run_id)
    if not owned:
        new = client_dimensions(spec, clients)
    else:
        slots = assign_dimensions(spec.seed, wanted.width, wanted.num_clients or len(owned))
        free = [slot for slot in slots if slot not in owned.values()]
        new = dict(zip((name for name in clients if name not in owned), free, strict=False))
    for name, dimensions in new.items():
        repository.add(session, run_id, name, dimensions)
        message = f"{name} owns {len(dimensions)} of the embedding's {wanted.width} dimensions"
        record(session, "dimensions.assigned", message, run_id=run_id, client_id=name)
    if without := {name for name in clients if name not in owned and name not in new}:
        for name in sorted(without - clients_told_of(session, run_id, EXHAUSTED)):
            message = f"no dimensions are left for {name}: raise num_clients of the add-on in the next run"
            record(session, EXHAUSTED, message, run_id=run_id, client_id=name)
    return [name for name in clients if name not in without]
