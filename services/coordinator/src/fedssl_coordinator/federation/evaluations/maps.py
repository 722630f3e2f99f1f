"""Shows the maps of representations that evaluations have stored."""

from uuid import UUID

from sqlalchemy.orm import Session

from fedssl.protocol.states import JobState
from fedssl.protocol.views import EmbeddingMapView
from fedssl_coordinator.core.problems import ProblemError
from fedssl_coordinator.federation.evaluations import repository
from fedssl_coordinator.federation.evaluations.service import show


def embedding_map(session: Session, evaluation_id: UUID) -> EmbeddingMapView:
    """Return an evaluation's map. Raises ProblemError if there is no such evaluation, or if it has no map."""
    row = show(session, evaluation_id)
    found = repository.embedding_map(session, evaluation_id)
    if found is not None:
        about_it = {"run_id": row.run_id, "round_number": row.round_number, "dataset": row.dataset}
        return EmbeddingMapView(evaluation_id=evaluation_id, **about_it, **found)
    if row.config.embedding_map is None:
        why = "was requested without one: `fedssl run evaluate RUN --map pca` requests an evaluation with a map"
    elif row.state == JobState.COMPLETED:
        why = "found only one test image, or representations that are not finite because the training has diverged"
    else:
        why = f"is {row.state}: the map is available when it is completed"
    raise ProblemError("not-found", f"evaluation {evaluation_id} has no map: it {why}")
