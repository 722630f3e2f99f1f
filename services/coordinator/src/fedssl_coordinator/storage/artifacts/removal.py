"""Removes single artifacts that have been replaced. The collector (`storage.retention`) finds everything else."""

import structlog

from fedssl_coordinator.core.db import UNREACHABLE, BrokenReference, transaction
from fedssl_coordinator.core.store import store
from fedssl_coordinator.storage.artifacts import repository

log = structlog.get_logger(__name__)


def release(digest: str) -> None:
    """Remove an artifact unless something still refers to it: first its row, then its bytes.

    Call it only if no process is about to store the artifact again, because equal bytes are one artifact. If the
    process is killed in between or the store fails, a file without a row remains, which the collector finds.
    """
    try:
        with transaction() as session:
            is_removed = repository.remove(session, digest)
    except BrokenReference:
        return
    except UNREACHABLE as error:
        log.warning("postgres.unreachable", error=type(error).__name__, consequence=f"artifact {digest} is left over")
        return
    if is_removed:
        try:
            store().delete(digest)
        except OSError as error:
            log.warning("store.failed", error=str(error), consequence=f"artifact {digest} is left over")
