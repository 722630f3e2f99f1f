"""Removes from the store what nobody needs any more.

An artifact's row is locked while its need is judged and its file removed. Whoever stores the same bytes meanwhile notes
that in the same row afterwards, and looks whether the file is there; whoever begins to refer to it takes a lock on the
row that waits for this one. So either the collector sees the need, or the other sees that the bytes are gone.
"""

import itertools
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import TypeVar
from uuid import UUID

import structlog
from sqlalchemy.orm import Session

from fedssl.artifacts.store import StoredFile
from fedssl_coordinator.core.audit import record
from fedssl_coordinator.core.db import exclusive, transaction
from fedssl_coordinator.core.settings import settings
from fedssl_coordinator.core.store import store
from fedssl_coordinator.storage.retention import repository
from fedssl_coordinator.storage.retention.repository import Keep, Removable
from fedssl_coordinator.storage.uploads.service import expire_uploads

log = structlog.get_logger(__name__)

LOCK = "collect"
ABANDONED = "abandoned"  # beside the repository's kinds: what was never stored
_BATCH = 100
T = TypeVar("T")
_WAIT_SECONDS = 0.2


class Collected:
    """Numbers of artifacts and bytes by kind."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.num_bytes: Counter[str] = Counter()

    def add(self, kind: str, sizes: Iterable[int]) -> None:
        for size in sizes:
            self.counts[kind] += 1
            self.num_bytes[kind] += size


def keep() -> Keep:
    """For how long what stays, by the settings."""
    now = settings()
    return Keep(now.keep_updates_seconds, now.keep_broadcasts_seconds, now.keep_unreferenced_seconds)


def collect(*, dry_run: bool = False) -> Collected | None:
    """Remove what may go, and say what it was; with `dry_run` only say. None: somebody holds collection up."""
    with exclusive(LOCK) as connection:
        if connection is None:
            return None
        collected = Collected()
        if dry_run:
            _preview(collected)
        else:
            _adopt_unknown_files()
            _remove(collected)
            _drop_unfinished(collected)
        return collected


@contextmanager
def held_up() -> Iterator[None]:
    """For the length of the block nothing is collected; waits for a collection in progress to end."""
    while True:
        with exclusive(LOCK) as connection:
            if connection is not None:
                yield
                return
        time.sleep(_WAIT_SECONDS)


def _remove(collected: Collected) -> None:
    with transaction() as session:
        found = repository.removable(session, keep())
    for (run_id, kind), rows in itertools.groupby(found, key=lambda row: (row.run_id, row.kind)):
        for batch in _batches(rows):
            collected.add(kind, _remove_batch(run_id, kind, batch))


def _remove_batch(run_id: UUID | None, kind: str, batch: list[Removable]) -> list[int]:
    """Remove those that may still go, with an event; their sizes. Killed in between, it is done again.

    Raises OSError where the store fails. What it may have removed by then is forgotten: what it has not is found later,
    as a file that no row knows of.
    """
    failure = None
    with transaction() as session:
        gone = set()
        for digest in sorted(repository.locked_removable(session, [row.digest for row in batch], keep())):
            gone.add(digest)
            try:
                store().delete(digest)
            except OSError as error:
                failure = error
                break
        repository.forget(session, gone)
        sizes = [row.num_bytes for row in batch if row.digest in gone]
        if sizes:
            _tell(session, run_id, kind, sizes)
    if failure is not None:
        raise failure
    return sizes


def _tell(session: Session, run_id: UUID | None, kind: str, sizes: list[int]) -> None:
    message = f"{len(sizes)} artifacts ({kind}) removed from the store, {sum(sizes)} bytes"
    data = {"kind": kind, "count": len(sizes), "bytes": sum(sizes)}
    record(session, "artifact.collected", message, run_id=run_id, data=data)


def _adopt_unknown_files() -> None:
    for batch in _batches(_old_files()):
        with transaction() as session:
            unknown = repository.unknown(session, [file.digest for file in batch])
            for file in batch:
                if file.digest in unknown:
                    repository.adopt(session, file.digest, file.num_bytes, file.age_seconds)


def _drop_unfinished(collected: Collected) -> None:
    """What uploads left that broke off and were not taken up again. Every kind of unfinished upload ends here."""
    dropped = store().drop_abandoned(settings().keep_unreferenced_seconds)
    dropped += expire_uploads(store(), datetime.now(UTC))
    if dropped:
        with transaction() as session:
            _tell(session, None, ABANDONED, dropped)
    collected.add(ABANDONED, dropped)


def _preview(collected: Collected) -> None:
    with transaction() as session:
        for row in repository.removable(session, keep()):
            collected.add(row.kind, [row.num_bytes])
        for batch in _batches(_old_files()):
            unknown = repository.unknown(session, [file.digest for file in batch])
            collected.add(repository.UNREFERENCED, [file.num_bytes for file in batch if file.digest in unknown])


def _old_files() -> Iterator[StoredFile]:
    """Not those that were written just now: the row that refers to them may be about to come."""
    oldest = settings().keep_unreferenced_seconds
    return (file for file in store().files() if file.age_seconds > oldest)


def _batches(items: Iterable[T]) -> Iterator[list[T]]:
    iterator = iter(items)
    while batch := list(itertools.islice(iterator, _BATCH)):
        yield batch
