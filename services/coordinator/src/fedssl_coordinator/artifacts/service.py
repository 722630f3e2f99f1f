"""Who may send and fetch which artifact, and the checks on the way in."""

import functools
from dataclasses import dataclass
from uuid import UUID

from sqlalchemy.orm import Session

from fedssl.artifacts.store import FileStore, Store
from fedssl.protocol.plan import ArtifactPlan, TensorSpec
from fedssl.protocol.states import AssignmentState, RoundState
from fedssl_coordinator.artifacts import repository
from fedssl_coordinator.auth import Caller
from fedssl_coordinator.models import Assignment, Round, Run
from fedssl_coordinator.problems import Happening, ProblemError
from fedssl_coordinator.settings import settings


@functools.lru_cache
def store() -> Store:
    """The process's artifact store."""
    return FileStore(settings().store_path)


@dataclass(frozen=True, slots=True)
class Permit:
    """What one assignment may upload."""

    assignment_id: UUID
    run_id: UUID
    round_number: int
    client_id: str
    tensors: tuple[TensorSpec, ...]

    def refusal(self, slug: str, detail: str) -> ProblemError:
        """The error for an upload that is not what was permitted, with its event."""
        happening = Happening("artifact.refused", detail, self.run_id, self.round_number, self.client_id)
        return ProblemError(slug, detail, happening=happening)


def permit_upload(session: Session, assignment_id: UUID, client_id: str, digest: str) -> Permit:
    """Raises ProblemError unless this client holds the assignment's lease and its round is open.

    What was accepted may be sent again: the answer to the first attempt may have been lost.
    """
    assignment = own_assignment(session, assignment_id, client_id)
    current = session.get_one(Round, assignment.round_id)
    run = session.get_one(Run, assignment.run_id)
    permit = Permit(
        assignment_id,
        run.id,
        assignment.round_number,
        client_id,
        ArtifactPlan.model_validate(run.plan).update,
    )
    if assignment.state == AssignmentState.ACCEPTED:
        if assignment.update_digest == digest:
            return permit
        detail = f"round {current.number} has already accepted another update of {client_id}: claim new work"
        raise permit.refusal("duplicate-update", detail)
    if current.state != RoundState.OPEN:
        detail = f"round {current.number} is no longer open: this came too late and changes nothing; claim new work"
        raise permit.refusal("round-closed", detail)
    if assignment.state != AssignmentState.LEASED:
        raise permit.refusal("lease-lost", f"the assignment is {assignment.state}: claim again")
    return permit


def own_assignment(session: Session, assignment_id: UUID, client_id: str) -> Assignment:
    """Raises ProblemError, with an event, where the assignment is another client's; nobody learns that it exists."""
    assignment = session.get(Assignment, assignment_id)
    if assignment is None or assignment.client_id != client_id:
        detail = f"{client_id} has no assignment {assignment_id}: claim work and use the id that it carries"
        happening = Happening("assignment.foreign", detail, client_id=client_id)
        raise ProblemError("not-found", detail, happening=happening)
    return assignment


def may_fetch(session: Session, digest: str, caller: Caller) -> None:
    """Operators may fetch any artifact; a worker what was broadcast to it. Otherwise it does not exist for them."""
    found = (
        repository.is_known(session, digest)
        if caller.client_id is None
        else repository.is_broadcast_to(session, digest, caller.client_id)
    )
    if not found:
        known = "one that an upload or a run has made" if caller.client_id is None else "what a round has sent you"
        raise ProblemError("not-found", f"no artifact {digest} for you: ask for {known}")
