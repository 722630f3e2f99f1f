"""Decides what may be removed from the store, and records what was, in the caller's transaction."""

from collections import Counter
from collections.abc import Iterable, Sequence
from uuid import UUID

from sqlalchemy.orm import Session

from fedssl.artifacts.store import StoredFile
from fedssl.wording import plural
from fedssl_coordinator.core.audit import record
from fedssl_coordinator.core.settings import settings
from fedssl_coordinator.core.store import store
from fedssl_coordinator.storage.retention import repository
from fedssl_coordinator.storage.retention.repository import RemovableArtifact, RetentionPeriods


class CollectionTotals:
    """How many artifacts were removed, and their bytes, by kind."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.num_bytes: Counter[str] = Counter()

    def add(self, kind: str, sizes: Iterable[int]) -> None:
        """Add artifacts of these sizes in bytes."""
        for size in sizes:
            self.counts[kind] += 1
            self.num_bytes[kind] += size


def retention_periods() -> RetentionPeriods:
    """Return for how long artifacts are kept, according to the settings."""
    now = settings()
    return RetentionPeriods(now.keep_updates_seconds, now.keep_broadcasts_seconds, now.keep_unreferenced_seconds)


def remove_batch(
    session: Session, run_id: UUID | None, kind: str, batch: Sequence[RemovableArtifact]
) -> tuple[list[int], OSError | None]:
    """Remove those of the artifacts that may still be removed, with an event.

    Returns their sizes in bytes, and the store's error if it failed. The row of the artifact at which it failed is
    deleted too, because its bytes may be gone: if they are not, they are found later as a file without a row. So only
    that later removal counts.
    """
    failure = None
    forgotten, removed = set(), set()
    for digest in sorted(repository.locked_removable(session, [row.digest for row in batch], retention_periods())):
        forgotten.add(digest)
        try:
            store().delete(digest)
        except OSError as error:
            failure = error
            break
        removed.add(digest)
    repository.forget(session, forgotten)
    sizes = [row.num_bytes for row in batch if row.digest in removed]
    if sizes:
        record_removal(session, run_id, kind, sizes)
    return sizes, failure


def record_removal(session: Session, run_id: UUID | None, kind: str, sizes: Sequence[int]) -> None:
    """Record an event about artifacts of one kind that were removed."""
    message = f"{plural(len(sizes), 'artifact')} ({kind}) removed from the store, {plural(sum(sizes), 'byte')}"
    data = {"kind": kind, "count": len(sizes), "bytes": sum(sizes)}
    record(session, "artifact.collected", message, run_id=run_id, data=data)


def adopt(session: Session, files: Sequence[StoredFile]) -> None:
    """Add a row for each of the files that has none, so that it expires like any other artifact."""
    for file in without_row(session, files):
        repository.adopt(session, file.digest, file.num_bytes, file.age_seconds)


def without_row(session: Session, files: Sequence[StoredFile]) -> list[StoredFile]:
    """Return those of the files that have no row."""
    unknown = repository.unknown(session, [file.digest for file in files])
    return [file for file in files if file.digest in unknown]
