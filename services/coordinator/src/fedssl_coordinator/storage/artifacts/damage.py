"""Artifacts whose bytes in the store are lost, or no longer match their digest.

A damaged artifact is moved aside, so that every process sees that the store lacks it, and that it can be stored again.
"""

import structlog

from fedssl_coordinator.core import enqueue
from fedssl_coordinator.core.audit import record
from fedssl_coordinator.core.db import transaction
from fedssl_coordinator.core.store import store
from fedssl_coordinator.storage.artifacts import repository

log = structlog.get_logger(__name__)


def set_aside(digest: str) -> bool:
    """Move an artifact aside if its bytes, read again, do not match its digest. Return whether this process did.

    The process that moves it records the event, so each damage is recorded once: for each run that needs the artifact
    to continue, or without a run.
    """
    if not store().set_aside(digest):
        return False
    message = f"artifact {digest} had other bytes in the store: it was moved to damaged/{digest}. {what_to_do(digest)}"
    log.error("artifact.damaged", digest=digest, place=store().place(digest))
    with transaction() as session:
        data = {"digest": digest}
        for run_id in repository.runs_in_need_of(session, digest) or [None]:
            record(session, "artifact.damaged", message, run_id=run_id, data=data)
        enqueue.wake_watchers(session)
    return True


def what_to_do(digest: str) -> str:
    """Return how an operator can repair the loss of an artifact."""
    return f"Restore it from a backup as {store().place(digest)}"
