"""Checks that the store has everything that the database refers to, for example after a restore."""

from collections.abc import Iterator
from dataclasses import dataclass

from fedssl.artifacts.store import digest_of_parts
from fedssl.errors import ArtifactNotFound
from fedssl_coordinator.core.db import transaction
from fedssl_coordinator.core.store import store
from fedssl_coordinator.storage.retention import repository
from fedssl_coordinator.storage.retention.service import retention_periods


@dataclass(frozen=True, slots=True)
class ArtifactCheck:
    """The check of one artifact that is needed. `fault` describes what is wrong with its file, or is None."""

    digest: str
    num_bytes: int
    fault: str | None


def verify_store() -> Iterator[ArtifactCheck]:
    """Read every artifact that is needed, and compare its bytes with its digest."""
    with transaction() as session:
        needed = repository.needed(session, retention_periods())
    for digest, num_bytes in needed:
        fault = fault_of(digest, num_bytes)
        if fault is None or _is_needed(digest):  # it may have been removed legitimately in the meantime
            yield ArtifactCheck(digest, num_bytes, fault)


def fault_of(digest: str, num_bytes: int | None = None) -> str | None:
    """Read all of an artifact in the store, and return what is wrong with it, or None."""
    try:
        size = store().size(digest)
        if num_bytes is not None and size != num_bytes:
            return f"has {size} bytes instead of {num_bytes}"
        found = digest_of_parts(store().read(digest, 0, size))  # of the store's own bytes, not of a local copy
        return None if found == digest else "has other bytes"
    except (ArtifactNotFound, FileNotFoundError):
        return "is missing"
    except OSError as error:
        return f"cannot be read: {error.strerror or error}"


def _is_needed(digest: str) -> bool:
    with transaction() as session:
        return repository.is_needed(session, digest, retention_periods())
