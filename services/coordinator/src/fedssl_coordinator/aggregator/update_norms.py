"""Records the distances of a round's updates from its broadcast when the round closes."""

from sqlalchemy.orm import Session

from fedssl.engine.norm_bounding import UPDATE_NORM, Norms
from fedssl_coordinator.core.audit import record
from fedssl_coordinator.core.models import Run
from fedssl_coordinator.federation.rounds import repository


def record_norms(session: Session, run: Run, round_number: int, norms: Norms) -> None:
    """Record a metric per client, and an event per update that was clipped or rejected.

    The assignment stays accepted: the client delivered, and continues from its own state as in any other round.
    """
    if not norms.by_client:
        return
    repository.add_metrics(session, run.id, round_number, UPDATE_NORM, norms.by_client)
    for kind, clients in (("update.clipped", norms.clipped), ("update.rejected", norms.rejected)):
        for client_id in clients:
            norm = norms.by_client[client_id]
            message = f"{client_id}: update {norm:.6g} from the broadcast, beyond robustness.max_update_norm"
            data = {"norm": norm}
            record(session, kind, message, run_id=run.id, round_number=round_number, client_id=client_id, data=data)


def describe(norms: Norms) -> str:
    """Return the clipped and rejected clients for the reason of the round's verdict."""
    rejected = f"; rejected by their norm: {', '.join(norms.rejected)}" if norms.rejected else ""
    return rejected + (f"; clipped: {', '.join(norms.clipped)}" if norms.clipped else "")
