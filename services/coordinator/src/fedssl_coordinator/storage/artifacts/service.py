"""Decides who may send and fetch which artifact, and records what was sent."""

import functools
from dataclasses import dataclass
from enum import Enum
from typing import ClassVar, Protocol
from uuid import UUID

from sqlalchemy.orm import Session

from fedssl.artifacts import images
from fedssl.artifacts.header import (
    LENGTH_BYTES,
    Header,
    check_header,
    header_bytes,
    in_file_order,
    max_file_bytes,
    max_header_bytes,
    parse_header,
)
from fedssl.artifacts.weight_files import MAX_HEADER_BYTES, check_registered
from fedssl.artifacts.weight_names import PREFIX
from fedssl.errors import ArtifactError, ArtifactNotFound
from fedssl.protocol.plan import TensorSpec
from fedssl.protocol.secure_work import vector_tensors
from fedssl.protocol.states import AssignmentState, RoundState
from fedssl_coordinator.core.logs import say_about
from fedssl_coordinator.core.models import Assignment, Round, Run
from fedssl_coordinator.core.problems import AuditEvent, ProblemError
from fedssl_coordinator.core.project_scope import restricted_to
from fedssl_coordinator.core.run_documents import plan_of, spec_of
from fedssl_coordinator.core.settings import settings
from fedssl_coordinator.core.store import store
from fedssl_coordinator.identity.authentication import Caller, require_valid
from fedssl_coordinator.identity.tokens.repository import SeenWorker
from fedssl_coordinator.storage.artifacts import repository

MAX_UPLOADS = 16  # per assignment: one is enough, but a worker that was killed before it submitted may send others
_TOO_MANY = f"{MAX_UPLOADS} different artifacts were sent for this assignment: submit one of them"


def record_stored(session: Session, digest: str, num_bytes: int) -> None:
    """Record an artifact that was just stored. The collector cannot remove its bytes before the commit.

    Raises ArtifactNotFound if the collector was faster: it removed the same bytes, which had been stored earlier and
    were no longer needed. Store them again.
    """
    repository.add(session, digest, num_bytes)
    if digest not in store():
        raise ArtifactNotFound(_removed(digest))


def record_arrival(session: Session, digest: str, num_bytes: int) -> None:
    """Do the same as `record_stored`, for an artifact that a caller sent. Raises ProblemError."""
    repository.add(session, digest, num_bytes)
    require_stored(digest)


def require_stored(digest: str) -> None:
    """Raise ProblemError if the store lacks an artifact that a caller sent, whose row this transaction has locked."""
    if digest not in store():
        raise ProblemError("unavailable", _removed(digest), headers={"Retry-After": "1"})


def _removed(digest: str) -> str:
    return f"artifact {digest} was removed while it was stored: store it again"


class UploadPermit(Protocol):
    """The limits and checks of one upload. `limit` names the setting or plan that `max_bytes` comes from."""

    @property
    def max_bytes(self) -> int: ...
    @property
    def max_header_bytes(self) -> int: ...
    @property
    def limit(self) -> str: ...

    def checked(self, text: bytes) -> Header:
        """Return the header in these bytes. Raises ArtifactError unless a file with it may be sent."""
        ...

    def refusal(self, slug: str, detail: str) -> ProblemError:
        """Return the error, with its event, for an upload that is not what was permitted."""
        ...


@dataclass(frozen=True)
class UpdateForm:
    """The header and the size that the files of all updates of a run have. They are computed once."""

    tensors: tuple[TensorSpec, ...]

    @functools.cached_property
    def header(self) -> Header:
        """The only header that such a file may have."""
        return parse_header(header_bytes(in_file_order(self.tensors))[LENGTH_BYTES:])

    @functools.cached_property
    def max_bytes(self) -> int:
        return max_file_bytes(self.tensors)


@functools.lru_cache(maxsize=16)
def update_form(tensors: tuple[TensorSpec, ...]) -> UpdateForm:
    """Return the form of these tensors' files. Looking up a plan's takes long, so keep it with the plan."""
    return UpdateForm(tensors)


@dataclass(frozen=True, slots=True)
class UpdatePermit:
    """The permit of an assignment's worker: exactly the tensors of the method's plan, or a masked vector."""

    assignment_id: UUID
    run_id: UUID
    round_number: int
    client_id: str
    form: UpdateForm
    limit: ClassVar[str] = "the method's artifact plan"

    @property
    def max_bytes(self) -> int:
        return self.form.max_bytes

    @property
    def max_header_bytes(self) -> int:
        return max_header_bytes(self.form.tensors)

    def checked(self, text: bytes) -> Header:
        """Return the header. Raises ArtifactError unless it has exactly the declared tensors, in the only form."""
        if text == self.form.header.text:
            return self.form.header
        check_header(header := parse_header(text), self.form.tensors, "update")
        return header

    def refusal(self, slug: str, detail: str) -> ProblemError:
        """Return the error, with its event, for an upload that is not what was permitted."""
        audit_event = AuditEvent("artifact.refused", detail, self.run_id, self.round_number, self.client_id)
        return ProblemError(slug, detail, audit_event=audit_event)


@dataclass(frozen=True, slots=True)
class OperatorPermit:
    """The permit of an operator: the file of a data set or of weights, which is registered afterwards."""

    max_bytes: int
    max_header_bytes: ClassVar[int] = MAX_HEADER_BYTES
    limit: ClassVar[str] = "FEDSSL_MAX_DATASET_BYTES"

    def checked(self, text: bytes) -> Header:
        """Return the header. Raises ArtifactError unless it is one of a data set, public or labelled, or of weights."""
        header = parse_header(text)
        if all(entry.name.startswith(PREFIX) for entry in header.entries):
            check_registered(header)
        elif header.data_start > LENGTH_BYTES + images.MAX_HEADER_BYTES:
            raise ArtifactError(f"the header of a data set has at most {images.MAX_HEADER_BYTES} bytes")
        else:
            images.data_set_shape(header)
        return header

    def refusal(self, slug: str, detail: str) -> ProblemError:
        """Return the error, with its event, for a file that is neither."""
        return ProblemError(slug, detail, audit_event=AuditEvent("artifact.refused", detail))


class UploadStatus(Enum):
    """The state of an artifact that a caller wants to send, according to the database."""

    MISSING = "missing"
    STORED = "stored"  # it is in the store, unless it was removed from there by other means
    SETTLED = "settled"  # its bytes are no longer needed, whether or not they are still stored


def is_lost(upload_status: UploadStatus, digest: str) -> bool:
    """Return whether the store lacks an artifact that it should have.

    The store may be slow to answer, so do not call this in a transaction.
    """
    return upload_status is UploadStatus.STORED and digest not in store()


def has_arrived(upload_status: UploadStatus, digest: str) -> bool:
    """Return whether the bytes need not be sent. Like `is_lost`, do not call this in a transaction."""
    return upload_status is not UploadStatus.MISSING and not is_lost(upload_status, digest)


def permit_for(
    session: Session, caller: Caller, assignment: UUID | None, digest: str
) -> tuple[UploadPermit, UploadStatus]:
    """Return what the caller may send, and whether it has arrived before. Raises ProblemError.

    Workers send the update of an assignment; operators send data sets and weights, without an
    assignment.
    """
    if caller.client_id is None:
        if assignment is not None:
            detail = (
                "an assignment's update needs a worker's token; yours is an operator's, which may only send data sets "
                "and weights"
            )
            raise ProblemError("forbidden", detail)
        is_there = repository.touch(session, digest) and is_of_project(session, digest)
        upload_status = UploadStatus.STORED if is_there else UploadStatus.MISSING
        return OperatorPermit(settings().max_dataset_bytes), upload_status
    assert assignment is not None, "workers send only updates"
    return permit_upload(session, assignment, caller.client_id, digest)


def is_of_project(session: Session, digest: str) -> bool:
    """Return whether the caller's project has an artifact: otherwise its bytes must be sent, although they are stored.

    Its digest, which others may learn, must not give access to the data set of another project.
    """
    is_for_all = restricted_to() is None
    return is_for_all or repository.was_sent(session, digest) or repository.is_referred_to(session, digest)


def check_announced(permit: UploadPermit, num_bytes: int) -> None:
    """Raise ProblemError if the announced size is larger than permitted."""
    if num_bytes > permit.max_bytes:
        detail = f"{num_bytes} bytes announced; {permit.limit} allows at most {permit.max_bytes}"
        raise permit.refusal("artifact-too-large", detail)


def record_upload(session: Session, token_id: UUID, assignment: UUID | None, digest: str, num_bytes: int) -> None:
    """Record an artifact that has arrived and is stored.

    Raises ProblemError if it must be sent again, or if its sender's token was revoked while the bytes arrived.
    """
    require_valid(session, token_id)
    record_arrival(session, digest, num_bytes)
    if assignment is not None:
        record_update(session, assignment, digest)
    elif restricted_to() is not None:
        repository.add_sent(session, token_id, digest, num_bytes)


def permit_upload(
    session: Session, assignment_id: UUID, client_id: str, digest: str
) -> tuple[UpdatePermit, UploadStatus]:
    """Do the same as `permit_for`, for the update of an assignment.

    Raises ProblemError unless this client holds the assignment's lease and its round is open. An accepted update may be
    sent again, because the response to the first attempt may have been lost.
    """
    assignment, current, run = own_assignment(session, assignment_id, client_id)
    plan = plan_of(run)
    tensors = plan.update
    if run.spec.get("secure_aggregation"):
        apart = spec_of(run).sent_apart(plan)
        tensors = vector_tensors(repository.num_secure_words(session, current.id), apart)
    permit = UpdatePermit(assignment_id, run.id, assignment.round_number, client_id, update_form(tensors))
    is_uploaded, num_uploads = repository.uploads_of(session, assignment_id, digest)
    upload_status = UploadStatus.STORED if is_uploaded else UploadStatus.MISSING
    if assignment.state == AssignmentState.ACCEPTED:
        if assignment.update_digest == digest:
            if is_uploaded and current.state == RoundState.CLOSED:
                return permit, UploadStatus.SETTLED  # it may have been removed since, and must not be stored again
            return permit, upload_status
        detail = f"round {current.number} has already accepted another update of {client_id}: claim new work"
        raise permit.refusal("duplicate-update", detail)
    if current.state != RoundState.OPEN:
        detail = f"round {current.number} is no longer open: this came too late and changes nothing; claim new work"
        raise permit.refusal("round-closed", detail)
    if assignment.state != AssignmentState.LEASED:
        raise permit.refusal("lease-lost", f"the assignment is {assignment.state}: claim again")
    if not is_uploaded and num_uploads >= MAX_UPLOADS:
        raise permit.refusal("conflict", _TOO_MANY)
    return permit, upload_status


def record_update(session: Session, assignment_id: UUID, digest: str) -> None:
    """Record that this assignment's worker sent the artifact.

    Raises ProblemError if the run was deleted in the meantime, or if too many other artifacts were sent for the
    assignment: they were counted before the body arrived, and are counted again here, under a lock.
    """
    if repository.locked_assignment(session, assignment_id) is None:
        raise ProblemError("not-found", f"no assignment {assignment_id} any more: its run was deleted; claim new work")
    add_upload(session, assignment_id, digest)


def add_upload(session: Session, assignment_id: UUID, digest: str) -> None:
    """Record that this assignment's worker sent the artifact. The caller has locked the assignment.

    Raises ProblemError if too many other artifacts were sent for it.
    """
    if not repository.add_upload(session, assignment_id, digest, MAX_UPLOADS):
        raise ProblemError("conflict", _TOO_MANY)


def own_assignment(session: Session, assignment_id: UUID, client_id: str) -> tuple[Assignment, Round, Run]:
    """Return an assignment of this client, its round and its run. Raises ProblemError if it is another client's."""
    found = repository.assignment(session, assignment_id)
    if found is None or found[0].client_id != client_id:
        raise foreign_assignment(assignment_id, client_id)
    say_about(run=str(found[0].run_id), round=found[0].round_number)
    return found


def foreign_assignment(assignment_id: UUID, client_id: str) -> ProblemError:
    """Return the error for an assignment that is not this client's, whether or not it exists, with its event."""
    detail = f"{client_id} has no assignment {assignment_id}: claim work and use the id that it carries"
    audit_event = AuditEvent("assignment.foreign", detail, client_id=client_id)
    return ProblemError("not-found", detail, audit_event=audit_event)


def worker_that_may_fetch(digest: str, secret_hash: str) -> SeenWorker | None:
    """Return the worker with this token if it is valid, and the artifact is one that `may_fetch` allows it to fetch."""
    return repository.worker_of_artifact(digest, secret_hash)


def may_fetch(session: Session, digest: str, caller: Caller) -> None:
    """Raise ProblemError unless the caller may fetch the artifact, as if it did not exist.

    Operators may fetch any artifact, or those of their project if they are restricted to one. Workers may fetch what
    was broadcast to them, what they are asked to evaluate, and the public images of runs whose assignments they have
    held.
    """
    found = (
        (repository.is_known(session, digest) if caller.project is None else repository.is_referred_to(session, digest))
        if caller.client_id is None
        else repository.is_broadcast_to(session, digest, caller.client_id)
        or repository.is_evaluated_by(session, digest, caller.client_id)
        or repository.is_public_for(session, digest, caller.client_id)
    )
    if not found:
        known = "one from an upload or a run" if caller.client_id is None else "one that your work names"
        raise ProblemError("not-found", f"no artifact {digest} for you: ask for {known}")
