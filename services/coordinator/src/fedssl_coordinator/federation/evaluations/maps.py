"""The maps of representations that evaluations have kept."""

from uuid import UUID

from sqlalchemy.orm import Session

from fedssl.protocol.states import JobState
from fedssl.protocol.views import EmbeddingMapView
from fedssl_coordinator.core.problems import ProblemError
from fedssl_coordinator.federation.evaluations import repository
from fedssl_coordinator.federation.evaluations.service import show


def embedding_map(session: Session, evaluation_id: UUID) -> EmbeddingMapView:
    """Raises ProblemError where there is no such evaluation, or it has kept no map."""
    row = show(session, evaluation_id)
    found = repository.embedding_map(session, evaluation_id)
    if found is not None:
        about_it = {"run_id": row.run_id, "round_number": row.round_number, "dataset": row.dataset}
        return EmbeddingMapView(evaluation_id=evaluation_id, **about_it, **found)
    if row.config.embedding_map is None:
        why = "was not asked for one: `fedssl run evaluate RUN --map pca` asks for one that is"
    elif row.state == JobState.COMPLETED:
        why = "found one image alone, or numbers that are not finite, as of a training that has diverged"
    else:
        why = f"is {row.state}: its map is there once it is completed"
    raise ProblemError("not-found", f"evaluation {evaluation_id} has no map: it {why}")
