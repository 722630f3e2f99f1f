"""Begins, resumes, completes and deletes uploads. An upload belongs to the token that announced it last."""

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import BinaryIO
from uuid import UUID

from sqlalchemy.orm import Session

from fedssl.artifacts.finite import check_finite_in
from fedssl.artifacts.hashed import HashedFile
from fedssl.artifacts.header import read_header
from fedssl.artifacts.partial import Partial
from fedssl.artifacts.store import DirectPart
from fedssl.errors import ArtifactError
from fedssl_coordinator.core.db import after_commit
from fedssl_coordinator.core.models import PartialUpload
from fedssl_coordinator.core.problems import ProblemError
from fedssl_coordinator.core.settings import settings
from fedssl_coordinator.core.store import store
from fedssl_coordinator.identity.authentication import Caller
from fedssl_coordinator.storage.artifacts import service as artifacts
from fedssl_coordinator.storage.artifacts.service import UploadPermit, UploadStatus
from fedssl_coordinator.storage.uploads import partial_files, repository

_PARTS_AT_ONCE = 16
_ENDED = "another request has just deleted or finished this upload: announce it again"


@dataclass(frozen=True, slots=True)
class AnnouncedUpload:
    """A file that a caller wants to send."""

    digest: str
    num_bytes: int
    assignment_id: UUID | None


def begin(
    session: Session, caller: Caller, announced: AnnouncedUpload, *, is_lost: bool
) -> tuple[PartialUpload, UploadPermit]:
    """Return the upload of this file, the existing one if it was announced before, so that announcing again is safe.

    An upload of another file for the same assignment is replaced. `is_lost` means that the store lacks the artifact,
    even if its row is complete. Raises ProblemError if the file may not be sent.
    """
    # The row is locked before the status is read, so that a process that is completing it records that afterwards.
    upload = repository.find(session, caller.token_id, announced.assignment_id, announced.digest)
    permit, upload_status = artifacts.permit_for(session, caller, announced.assignment_id, announced.digest)
    artifacts.check_announced(permit, announced.num_bytes)
    if upload is not None and (upload.digest, upload.num_bytes) != (announced.digest, announced.num_bytes):
        delete(session, upload.id)
        upload = None
    if upload is None:
        upload = repository.add(
            session, caller.token_id, announced.assignment_id, announced.digest, announced.num_bytes
        )
    if upload is None:
        raise busy("another request is beginning the same upload at this moment: announce it again shortly")
    upload.token_id = caller.token_id
    upload.is_complete = upload_status is not UploadStatus.MISSING and not is_lost
    return upload, permit


def resume(session: Session, caller: Caller, upload_id: UUID) -> tuple[PartialUpload, UploadPermit]:
    """Return an upload of the caller's that may be continued. Raises ProblemError."""
    upload = require_own(session, caller, upload_id)
    permit, _ = artifacts.permit_for(session, caller, upload.assignment_id, upload.digest)
    return upload, permit


def require_own(session: Session, caller: Caller, upload_id: UUID) -> PartialUpload:
    """Return an upload of the caller's. Raises ProblemError if it is another caller's, as if it did not exist."""
    upload = repository.get(session, upload_id)
    if upload is None or upload.token_id != caller.token_id:
        detail = f"no upload {upload_id} of yours: it has expired, or was never begun; begin it with POST /v1/uploads"
        raise ProblemError("not-found", detail)
    return upload


def partial_of(upload: PartialUpload) -> Partial:
    """Return the partial file that holds an upload's bytes while they arrive."""
    return partial_files.of(upload.id)


def offset_of(upload: PartialUpload) -> int:
    """Return the byte at which an upload continues."""
    return upload.num_bytes if upload.is_complete else partial_of(upload).size


def offset_when_whole(upload: PartialUpload) -> int:
    """Return the offset of an upload whose bytes have all arrived. Raises ProblemError if bytes are missing.

    Then another request has just deleted the upload's bytes, or made an artifact of them.
    """
    if (offset := offset_of(upload)) != upload.num_bytes:
        raise busy(_ENDED)
    return offset


def require_not_deleted(session: Session, upload_id: UUID) -> None:
    """Raise ProblemError if another request has deleted an upload."""
    if repository.get(session, upload_id) is None:
        raise busy(_ENDED)


def expiry_of(upload: PartialUpload) -> datetime:
    """Return when an upload expires unless more bytes arrive, in UTC whatever the database's time zone is."""
    return (partial_files.last_progress(upload) + timedelta(seconds=settings().upload_seconds)).astimezone(UTC)


def is_direct() -> bool:
    """Return whether senders may write their bytes to the object store directly."""
    return settings().store_direct


def missing_parts(upload: PartialUpload) -> list[DirectPart]:
    """Return addresses for some of the missing parts; none are missing if the list is empty. Raises ProblemError."""
    direct = store().direct(upload.id.hex, upload.num_bytes) if is_direct() else None
    if direct is None:
        detail = "this coordinator has no direct uploads: send the bytes with PATCH"
        raise ProblemError("not-found", detail)
    return [] if upload.is_complete else direct.missing(_PARTS_AT_ONCE)


def delete(session: Session, upload_id: UUID) -> None:
    """Delete an upload. Its bytes are removed after the commit."""
    repository.remove(session, upload_id)
    after_commit(session, partial_files.discard, upload_id.hex)


def complete(session: Session, upload: PartialUpload) -> None:
    """Record that an upload has become an artifact, which is stored. Raises ProblemError if it must be sent again."""
    artifacts.record_upload(session, upload.token_id, upload.assignment_id, upload.digest, upload.num_bytes)
    repository.complete(session, upload.id)


def is_complete(session: Session, upload_id: UUID) -> bool:
    """Return whether an upload has become an artifact."""
    upload = repository.get(session, upload_id)
    return upload is not None and upload.is_complete


def check_file(path: Path, digest: str, permit: UploadPermit, arrived: HashedFile | None = None) -> None:
    """Raise ArtifactError unless the file has this digest, is whole, matches the permit, and all of its numbers are
    finite. It is hashed again unless `arrived` is the same file, hashed while it arrived."""
    if arrived is not None and not arrived.is_at(path):
        arrived = None
    with path.open("rb") as opened:
        file = arrived or HashedFile(opened)
        try:
            _check_content(opened if file is arrived else file, path.stat().st_size, permit)
        except ArtifactError:
            file.require(digest)  # damaged bytes would give misleading errors about the tensors
            raise
        file.require(digest)


def _check_content(file: BinaryIO | HashedFile, size: int, permit: UploadPermit) -> None:
    header = permit.checked(read_header(file, permit.max_header_bytes).text)
    if header.total_bytes != size:
        raise ArtifactError(f"the header describes {header.total_bytes} bytes, but {size} arrived")
    check_finite_in(file, header)


def busy(detail: str) -> ProblemError:
    """Return the error for an upload that another request is changing."""
    return ProblemError("upload-busy", detail, headers={"Retry-After": "1"})
