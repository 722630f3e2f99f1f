"""Who may send and fetch which artifact, and the checks on the way in."""

from dataclasses import dataclass
from enum import Enum
from typing import ClassVar, Protocol
from uuid import UUID

import structlog
from sqlalchemy.orm import Session

from fedssl.artifacts.header import Header, check_header, max_file_bytes, max_header_bytes
from fedssl.artifacts.images import MAX_HEADER_BYTES, data_set_shape
from fedssl.errors import ArtifactNotFound
from fedssl.protocol.plan import ArtifactPlan, TensorSpec
from fedssl.protocol.states import AssignmentState, RoundState
from fedssl_coordinator.core.db import UNREACHABLE, Referred, transaction
from fedssl_coordinator.core.logs import say_about
from fedssl_coordinator.core.models import Assignment, Round, Run
from fedssl_coordinator.core.problems import AuditEvent, ProblemError
from fedssl_coordinator.core.settings import settings
from fedssl_coordinator.core.store import store
from fedssl_coordinator.identity.authentication import Caller
from fedssl_coordinator.storage.artifacts import repository

log = structlog.get_logger(__name__)

_MAX_UPLOADS = 16  # of one assignment: one is enough, a worker killed before it submitted may send others
_TOO_MANY = f"{_MAX_UPLOADS} different artifacts were sent for this assignment: submit one of them"


def note(session: Session, digest: str, num_bytes: int) -> None:
    """Note an artifact that was stored just now; from here to the commit nobody removes its bytes.

    Raises ArtifactNotFound where the collector was a moment faster: it took the same bytes, stored earlier and of no
    more use. Store them again.
    """
    repository.add(session, digest, num_bytes)
    if digest not in store():
        raise ArtifactNotFound(f"artifact {digest} was removed while it was stored: store it again")


def release(digest: str) -> None:
    """Remove an artifact that nothing refers to any more, from the table first; one that something refers to stays.

    Only for one that nobody is about to store again, since equal bytes are one artifact. A process that is killed in
    between, and a store that fails, leave a file that no row knows of, which the collector finds.
    """
    try:
        with transaction() as session:
            is_removed = repository.remove(session, digest)
    except Referred:
        return
    except UNREACHABLE as error:
        log.warning("postgres.unreachable", error=type(error).__name__, consequence=f"artifact {digest} is left over")
        return
    if is_removed:
        try:
            store().delete(digest)
        except OSError as error:
            log.warning("store.failed", error=str(error), consequence=f"artifact {digest} is left over")


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
        audit_event = AuditEvent("artifact.refused", detail, self.run_id, self.round_number, self.client_id)
        return ProblemError(slug, detail, audit_event=audit_event)


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
        return ProblemError(slug, detail, audit_event=AuditEvent("artifact.refused", detail))


class UploadStatus(Enum):
    """What is known of an artifact that is to be sent."""

    MISSING = "missing"
    STORED = "stored"  # it is in the store, unless somebody else removed it there
    SETTLED = "settled"  # its bytes are needed no more, wherever they are


def is_lost(arrival: UploadStatus, digest: str) -> bool:
    """Whether the store lacks what it should have. It may be slow to answer: ask in no transaction."""
    return arrival is UploadStatus.STORED and digest not in store()


def permit(session: Session, caller: Caller, assignment: UUID | None, digest: str) -> tuple[Permit, UploadStatus]:
    """What the caller may send, and whether it has arrived before. Raises ProblemError.

    An assignment's update is sent by its worker, a data set by an operator, who names no assignment.
    """
    if caller.client_id is None:
        if assignment is not None:
            detail = (
                "an assignment's update needs a worker's token; yours is an operator's, who may send data sets alone"
            )
            raise ProblemError("forbidden", detail)
        arrival = UploadStatus.STORED if repository.touch(session, digest) else UploadStatus.MISSING
        return DatasetPermit(settings().max_dataset_bytes), arrival
    assert assignment is not None, "a worker sends updates alone"
    return permit_upload(session, assignment, caller.client_id, digest)


def check_announced(permit: Permit, num_bytes: int) -> None:
    """Raise ProblemError where the size that is announced is more than may be sent."""
    if num_bytes > permit.max_bytes:
        detail = f"{num_bytes} bytes announced; {permit.limit} allows at most {permit.max_bytes}"
        raise permit.refusal("artifact-too-large", detail)


def note_sent(session: Session, assignment: UUID | None, digest: str, num_bytes: int) -> None:
    """Note an artifact that has arrived and is stored. Raises ProblemError where it must be sent again."""
    try:
        note(session, digest, num_bytes)
    except ArtifactNotFound as error:
        raise ProblemError("unavailable", str(error), headers={"Retry-After": "1"}) from None
    if assignment is not None:
        note_upload(session, assignment, digest)


def permit_upload(
    session: Session, assignment_id: UUID, client_id: str, digest: str
) -> tuple[UpdatePermit, UploadStatus]:
    """As `permit`. Raises ProblemError unless this client holds the assignment's lease and its round is open.

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
    arrival = UploadStatus.STORED if repository.is_uploaded(session, assignment_id, digest) else UploadStatus.MISSING
    if assignment.state == AssignmentState.ACCEPTED:
        if assignment.update_digest == digest:
            if arrival is UploadStatus.STORED and current.state == RoundState.CLOSED:
                return permit, UploadStatus.SETTLED  # it may be gone again, and is not to come back
            return permit, arrival
        detail = f"round {current.number} has already accepted another update of {client_id}: claim new work"
        raise permit.refusal("duplicate-update", detail)
    if current.state != RoundState.OPEN:
        detail = f"round {current.number} is no longer open: this came too late and changes nothing; claim new work"
        raise permit.refusal("round-closed", detail)
    if assignment.state != AssignmentState.LEASED:
        raise permit.refusal("lease-lost", f"the assignment is {assignment.state}: claim again")
    if arrival is UploadStatus.MISSING and repository.num_uploads(session, assignment_id) >= _MAX_UPLOADS:
        raise permit.refusal("conflict", _TOO_MANY)
    return permit, arrival


def note_upload(session: Session, assignment_id: UUID, digest: str) -> None:
    """Note that this assignment's worker sent the artifact.

    Raises ProblemError where its run was deleted meanwhile, or as many others have arrived as may: they were counted
    before the body came, and are again one after the other.
    """
    lock = {"key_share": True}
    if session.get(Assignment, assignment_id, with_for_update=lock, populate_existing=True) is None:
        raise ProblemError("not-found", f"no assignment {assignment_id} any more: its run was deleted; claim new work")
    is_new = not repository.is_uploaded(session, assignment_id, digest)
    if is_new and repository.num_uploads(session, assignment_id) >= _MAX_UPLOADS:
        raise ProblemError("conflict", _TOO_MANY)
    repository.add_upload(session, assignment_id, digest)


def own_assignment(session: Session, assignment_id: UUID, client_id: str) -> Assignment:
    """Raises ProblemError, with an event, where the assignment is another client's; nobody learns that it exists."""
    assignment = session.get(Assignment, assignment_id)
    if assignment is None or assignment.client_id != client_id:
        detail = f"{client_id} has no assignment {assignment_id}: claim work and use the id that it carries"
        audit_event = AuditEvent("assignment.foreign", detail, client_id=client_id)
        raise ProblemError("not-found", detail, audit_event=audit_event)
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
