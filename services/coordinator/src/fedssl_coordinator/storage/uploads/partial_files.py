"""The partial files of uploads in the store. Each is named by the id of its upload."""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from uuid import UUID

import structlog

from fedssl.artifacts.partial import Partial
from fedssl_coordinator.core.models import PartialUpload
from fedssl_coordinator.core.store import store

log = structlog.get_logger(__name__)


def of(upload_id: UUID) -> Partial:
    """Return the partial file of an upload."""
    return store().partial(upload_id.hex)


def last_progress(upload: PartialUpload) -> datetime:
    """Return when bytes of the upload arrived last, or when it was announced if none have arrived."""
    written_at = of(upload.id).written_at
    return upload.created_at if written_at is None else datetime.fromtimestamp(written_at, UTC)


def remove(partial: Partial) -> list[int]:
    """Remove a partial file. Returns its size in a list, or an empty list if there was no file. Raises OSError."""
    sizes = [] if partial.written_at is None else [partial.size]
    partial.discard()
    return sizes


def discard(name: str) -> None:
    """Remove a partial file, or log that the store failed."""
    with left_over(name):
        store().partial(name).discard()


@contextmanager
def left_over(name: str) -> Iterator[None]:
    """Log that the store failed to remove a partial file, and continue: a later collection removes it."""
    try:
        yield
    except OSError as error:
        log.warning("store.failed", error=str(error), consequence=f"upload {name} is left over")
