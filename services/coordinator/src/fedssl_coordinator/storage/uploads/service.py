"""Begins, continues, finishes and forgets uploads. An upload belongs to the token that it was begun with last."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from uuid import UUID

import structlog
from sqlalchemy.orm import Session

from fedssl.artifacts.finite import check_finite
from fedssl.artifacts.header import read_header
from fedssl.artifacts.partial import Partial
from fedssl.artifacts.store import DirectPart, Store, digest_of, require_digest
from fedssl.errors import ArtifactError
from fedssl_coordinator.core.db import after_commit, transaction
from fedssl_coordinator.core.models import PartialUpload
from fedssl_coordinator.core.problems import ProblemError
from fedssl_coordinator.core.settings import settings
from fedssl_coordinator.core.store import store
from fedssl_coordinator.identity.authentication import Caller
from fedssl_coordinator.storage.artifacts import service as artifacts
from fedssl_coordinator.storage.artifacts.service import Permit, UploadStatus
from fedssl_coordinator.storage.uploads import repository

log = structlog.get_logger(__name__)

_PARTS_AT_ONCE = 16


@dataclass(frozen=True, slots=True)
class Announced:
    """What is to be sent."""

    digest: str
    num_bytes: int
    assignment_id: UUID | None


def begin(session: Session, caller: Caller, announced: Announced, *, is_lost: bool) -> tuple[PartialUpload, Permit]:
    """The upload of this file: the one that was begun before, where there is one, so that asking again does no harm.

    Another file for the same assignment takes its place. `is_lost`: the store lacks it, whatever is known of it. Raises
    ProblemError where it may not be sent.
    """
    # Locked before it is asked what has arrived: who finishes it meanwhile says so afterwards.
    upload = repository.find(session, caller.token_id, announced.assignment_id, announced.digest)
    permit, arrival = artifacts.permit(session, caller, announced.assignment_id, announced.digest)
    artifacts.check_announced(permit, announced.num_bytes)
    if upload is not None and (upload.digest, upload.num_bytes) != (announced.digest, announced.num_bytes):
        forget(session, upload.id)
        upload = None
    if upload is None:
        upload = repository.add(
            session, caller.token_id, announced.assignment_id, announced.digest, announced.num_bytes
        )
    if upload is None:
        raise _busy("the same upload is being begun elsewhere at this moment: ask again shortly")
    upload.token_id = caller.token_id
    upload.is_complete = arrival is not UploadStatus.MISSING and not is_lost
    return upload, permit


def resume(session: Session, caller: Caller, upload_id: UUID) -> tuple[PartialUpload, Permit]:
    """An upload of the caller's own, which may still go on. Raises ProblemError."""
    upload = require_own(session, caller, upload_id)
    permit, _ = artifacts.permit(session, caller, upload.assignment_id, upload.digest)
    return upload, permit


def require_own(session: Session, caller: Caller, upload_id: UUID) -> PartialUpload:
    """Raises ProblemError where it is another's; nobody learns that it exists."""
    upload = repository.get(session, upload_id)
    if upload is None or upload.token_id != caller.token_id:
        detail = f"no upload {upload_id} of yours: it has expired, or was never begun; begin it with POST /v1/uploads"
        raise ProblemError("not-found", detail)
    return upload


def partial_of(upload: PartialUpload) -> Partial:
    """Where its bytes are while they arrive."""
    return store().partial(_name(upload.id))


def offset_of(upload: PartialUpload) -> int:
    """The byte at which it goes on."""
    return upload.num_bytes if upload.is_complete else partial_of(upload).size


def offset_when_whole(upload: PartialUpload) -> int:
    """As `offset_of`. Raises ProblemError where bytes are missing: it has just been dropped, or finished elsewhere."""
    if (offset := offset_of(upload)) != upload.num_bytes:
        raise _busy("it has just been dropped, or finished elsewhere: announce it again")
    return offset


def expiry_of(upload: PartialUpload) -> datetime:
    """When it is forgotten, unless more bytes arrive; in UTC, whatever the database's time zone."""
    return (_last_progress(store(), upload) + timedelta(seconds=settings().upload_seconds)).astimezone(UTC)


def finish(upload: PartialUpload, permit: Permit) -> None:
    """Check what has arrived as a whole, and make an artifact of it: by one process, however many ask for it.

    Raises ArtifactError where it is not what was announced, and ProblemError while another process checks it, or this
    one checks as many as it may.
    """
    partial = partial_of(upload)
    with partial.locked() as held:
        if not held or partial.size != upload.num_bytes:  # another has it or has just finished it, or too many are open
            if _is_complete(upload.id):
                return
            raise _busy("its bytes are all there, and are being checked or will be next: ask again shortly")
        with partial.whole() as whole:
            require_digest(digest_of(whole.path), upload.digest)
            _check(whole.path, permit)
            whole.keep(upload.digest)
        with transaction() as session:
            artifacts.note_sent(session, upload.assignment_id, upload.digest, upload.num_bytes)
            repository.complete(session, upload.id)


def is_direct() -> bool:
    """Whether senders may put their bytes into the object store themselves."""
    return settings().store_direct


def missing_parts(upload: PartialUpload) -> list[DirectPart]:
    """Where its sender puts what is missing, some parts at a time; none: all of it is there. Raises ProblemError."""
    direct = store().direct(_name(upload.id), upload.num_bytes) if is_direct() else None
    if direct is None:
        detail = "this coordinator takes uploads itself: send the bytes with PATCH"
        raise ProblemError("not-found", detail)
    return [] if upload.is_complete else direct.missing(_PARTS_AT_ONCE)


def forget(session: Session, upload_id: UUID) -> None:
    """End an upload; its bytes go once that is committed."""
    repository.remove(session, upload_id)
    after_commit(session, _discard, _name(upload_id))


def expire_uploads(store: Store, now: datetime) -> list[int]:
    """Forget uploads that have not moved for `FEDSSL_UPLOAD_SECONDS`, and bytes that belong to none.

    As often as one likes; one that the store does not let go stays for the next time. Returns the bytes of each that
    were removed.
    """
    limit = now - timedelta(seconds=settings().upload_seconds)
    dropped: list[int] = []
    with transaction() as session:
        old = repository.ids_begun_before(session, limit)
    for upload_id in old:
        with _left_over(upload_id.hex), transaction() as session:  # a short one: its sender may be back, and waits
            upload = repository.unwatched(session, upload_id)
            if upload is not None and _last_progress(store, upload) < limit:
                dropped += _dropped(store.partial(_name(upload_id)))
                repository.remove(session, upload_id)
    # A file comes after its row is committed, and the names are read first: what no row knows then is nobody's.
    names = set(store.partials())
    with transaction() as session:
        names -= {_name(known) for known in repository.all_ids(session)}
    for name in names:
        with _left_over(name):
            dropped += _dropped(store.partial(name))
    return dropped


def _dropped(partial: Partial) -> list[int]:
    """The size of what was there and has been removed, if anything was."""
    sizes = [] if partial.written_at is None else [partial.size]
    partial.discard()
    return sizes


def _check(path: Path, permit: Permit) -> None:
    """Raise ArtifactError unless the file is whole, holds what was permitted, and finite numbers."""
    with path.open("rb") as file:
        header = read_header(file, permit.max_header_bytes)
    permit.check(header)
    if header.total_bytes != (size := path.stat().st_size):
        raise ArtifactError(f"the header describes {header.total_bytes} bytes, {size} came")
    check_finite(path, header)


def _last_progress(store: Store, upload: PartialUpload) -> datetime:
    written_at = store.partial(_name(upload.id)).written_at
    return upload.created_at if written_at is None else datetime.fromtimestamp(written_at, UTC)


def _is_complete(upload_id: UUID) -> bool:
    with transaction() as session:
        upload = repository.get(session, upload_id)
        return upload is not None and upload.is_complete


def _name(upload_id: UUID) -> str:
    return upload_id.hex


def _discard(name: str) -> None:
    with _left_over(name):
        store().partial(name).discard()


@contextmanager
def _left_over(name: str) -> Iterator[None]:
    """What the store does not remove now is removed with a later collection, and keeps nobody from anything."""
    try:
        yield
    except OSError as error:
        log.warning("store.failed", error=str(error), consequence=f"upload {name} is left over")


def _busy(detail: str) -> ProblemError:
    return ProblemError("upload-busy", detail, headers={"Retry-After": "1"})
