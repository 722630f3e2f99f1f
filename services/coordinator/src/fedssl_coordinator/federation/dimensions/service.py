"""Assigns every client of a run its own dimensions, permanently, from the run's seed."""

from collections.abc import Sequence
from uuid import UUID

from sqlalchemy.orm import Session

from fedssl.dimensions import assign_dimensions, client_dimensions
from fedssl.protocol.runs import RunSpec
from fedssl_coordinator.core.audit import clients_told_of, record
from fedssl_coordinator.federation.dimensions import repository

EXHAUSTED = "dimensions.exhausted"


def owners(session: Session, run_id: UUID, spec: RunSpec, clients: Sequence[str]) -> list[str]:
    """Return which of `clients` can take part: all, unless the method divides the embedding and no slot is left.

    The clients of the first round take the slots in the order of their names, as in a simulation. A client that joins
    later takes the next free slot, if `num_clients` left one; otherwise one event reports that none is left for it. The
    dimensions of a client never change owner, not even after it was revoked. Raises SpecError if the first round has
    too many clients. The caller holds the run's lock, so two clients that join at once cannot take the same slot.
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
