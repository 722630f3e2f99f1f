"""Who may send and fetch which artifact, and the checks on the way in."""

import functools
from dataclasses import dataclass
from typing import ClassVar, Protocol
from uuid import UUID

import structlog
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from fedssl.artifacts.header import Header, check_header, max_file_bytes, max_header_bytes
from fedssl.artifacts.images import MAX_HEADER_BYTES, data_set_shape
from fedssl.artifacts.store import FileStore, Store
from fedssl.protocol.plan import ArtifactPlan, TensorSpec
from fedssl.protocol.states import AssignmentState, RoundState
from fedssl_coordinator.artifacts import repository
from fedssl_coordinator.auth import Caller
from fedssl_coordinator.db import UNREACHABLE, transaction
from fedssl_coordinator.logs import say_about
from fedssl_coordinator.models import Assignment, Round, Run
from fedssl_coordinator.problems import Happening, ProblemError
from fedssl_coordinator.settings import settings

log = structlog.get_logger(__name__)


@functools.lru_cache
def store() -> Store:
    """The process's artifact store."""
    return FileStore(settings().store_path)


def release(digest: str) -> None:
    """Remove an artifact that nothing refers to any more, from the table first; one that something refers to stays.

    Only for one that nobody is about to store again, since equal bytes are one artifact. A process that is killed in
    between leaves a file that no row knows of.
    """
    try:
        with transaction() as session:
            is_removed = repository.remove(session, digest)
    except IntegrityError:
        return
    except UNREACHABLE as error:
        log.warning("postgres.unreachable", error=type(error).__name__, consequence=f"artifact {digest} is left over")
        return
    if is_removed:
        store().delete(digest)


class Permit(Protocol):
    """What one upload may be: `limit` says whose bounds `max_bytes` and `max_header_bytes` are."""

    @property
    def max_bytes(self) -> int: ...
    @property
    def max_header_bytes(self) -> int: ...
    @property
    def limit(self) -> str: ...

    def check(self, header: Header) -> None:
        """Raise ArtifactError unless the header is that of a file which may be sent."""
        ...

    def refusal(self, slug: str, detail: str) -> ProblemError:
        """The error for an upload that is not what was permitted, with its event."""
        ...


@dataclass(frozen=True, slots=True)
class UpdatePermit:
    """What one assignment may upload."""

    assignment_id: UUID
    run_id: UUID
    round_number: int
    client_id: str
    tensors: tuple[TensorSpec, ...]
    limit: ClassVar[str] = "the method's artifact plan"

    @property
    def max_bytes(self) -> int:
        return max_file_bytes(self.tensors)

    @property
    def max_header_bytes(self) -> int:
        return max_header_bytes(self.tensors)

    def check(self, header: Header) -> None:
        """Raise PlanMismatch unless the header holds exactly the declared tensors."""
        check_header(header, self.tensors, "update")

    def refusal(self, slug: str, detail: str) -> ProblemError:
        """The error for an upload that is not what was permitted, with its event."""
        happening = Happening("artifact.refused", detail, self.run_id, self.round_number, self.client_id)
        return ProblemError(slug, detail, happening=happening)


@dataclass(frozen=True, slots=True)
class DatasetPermit:
    """What an operator may upload: the file of a data set, to be registered afterwards."""

    max_bytes: int
    max_header_bytes: ClassVar[int] = MAX_HEADER_BYTES
    limit: ClassVar[str] = "FEDSSL_MAX_DATASET_BYTES"

    def check(self, header: Header) -> None:
        """Raise ArtifactError unless the header is that of a public or a labelled data set."""
        data_set_shape(header)

    def refusal(self, slug: str, detail: str) -> ProblemError:
        """The error for a file that is no data set, with its event."""
        return ProblemError(slug, detail, happening=Happening("artifact.refused", detail))


def permit_upload(session: Session, assignment_id: UUID, client_id: str, digest: str) -> UpdatePermit:
    """Raises ProblemError unless this client holds the assignment's lease and its round is open.

    What was accepted may be sent again: the answer to the first attempt may have been lost.
    """
    assignment = own_assignment(session, assignment_id, client_id)
    current = session.get_one(Round, assignment.round_id)
    run = session.get_one(Run, assignment.run_id)
    permit = UpdatePermit(
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
    say_about(run=str(assignment.run_id), round=assignment.round_number)
    return assignment


def may_fetch(session: Session, digest: str, caller: Caller) -> None:
    """Operators may fetch any artifact; a worker what was broadcast to it, and the public images of runs that it has
    held work of. Otherwise the artifact does not exist for them.
    """
    found = (
        repository.is_known(session, digest)
        if caller.client_id is None
        else repository.is_broadcast_to(session, digest, caller.client_id)
        or repository.is_public_for(session, digest, caller.client_id)
    )
    if not found:
        known = "one that an upload or a run has made" if caller.client_id is None else "what your work names"
        raise ProblemError("not-found", f"no artifact {digest} for you: ask for {known}")
