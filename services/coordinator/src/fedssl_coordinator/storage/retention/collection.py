"""Removes from the store what is no longer needed, in many short transactions.

An artifact's row is locked while it is decided whether the artifact is needed, and while its file is removed. A process
that stores the same bytes in the meantime records that in the same row afterwards, and checks that the file exists. A
process that wants to refer to the artifact waits for a lock on the row. So either the collector sees that the artifact
is needed, or the other process sees that its bytes are gone.
"""

import itertools
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import TypeVar

from sqlalchemy import text

from fedssl.artifacts.store import StoredFile
from fedssl_coordinator.core.db import exclusive, transaction
from fedssl_coordinator.core.settings import settings
from fedssl_coordinator.core.store import store
from fedssl_coordinator.storage.retention import repository, service
from fedssl_coordinator.storage.retention.service import CollectionTotals, retention_periods
from fedssl_coordinator.storage.uploads.expiry import expire_uploads

LOCK = "collect"
ABANDONED = "abandoned"  # what never became an artifact, in addition to the repository's kinds
_BATCH = 100
T = TypeVar("T")
_WAIT_SECONDS = 0.2


def collect(*, dry_run: bool = False) -> CollectionTotals | None:
    """Remove what may be removed, or only count it with `dry_run`. Returns None if collection is locked.

    It is locked by a collection in progress and by `held_up`. Safe to repeat after the process was killed.
    """
    with exclusive(LOCK) as connection:
        if connection is None:
            return None
        totals = CollectionTotals()
        if dry_run:
            _preview(totals)
        else:
            _adopt_unknown_files()
            _remove(totals)
            _remove_unfinished(totals)
        return totals


@contextmanager
def held_up() -> Iterator[None]:
    """Prevent collections for the length of the block, after waiting for a collection in progress to end.

    Raises one of UNREACHABLE at the end if the connection that held the lock broke: then a collection may have run.
    """
    while True:
        with exclusive(LOCK) as connection:
            if connection is not None:
                yield
                connection.execute(text("SELECT 1"))
                return
        time.sleep(_WAIT_SECONDS)


def _remove(totals: CollectionTotals) -> None:
    """Remove artifacts, in one transaction per batch. Raises OSError if the store fails."""
    with transaction() as session:
        found = repository.removable(session, retention_periods())
    for (run_id, kind), rows in itertools.groupby(found, key=lambda row: (row.run_id, row.kind)):
        for batch in _batches(rows):
            with transaction() as session:
                sizes, failure = service.remove_batch(session, run_id, kind, batch)
            if failure is not None:  # raised after the commit, so that what was removed until then is recorded
                raise failure
            totals.add(kind, sizes)


def _adopt_unknown_files() -> None:
    for batch in _batches(_old_files()):
        with transaction() as session:
            service.adopt(session, batch)


def _remove_unfinished(totals: CollectionTotals) -> None:
    """Remove the remains of interrupted uploads of every kind that were not resumed."""
    removed = store().drop_abandoned(settings().keep_unreferenced_seconds)
    removed += expire_uploads(datetime.now(UTC))
    if removed:
        with transaction() as session:
            service.record_removal(session, None, ABANDONED, removed)
    totals.add(ABANDONED, removed)


def _preview(totals: CollectionTotals) -> None:
    with transaction() as session:
        for row in repository.removable(session, retention_periods()):
            totals.add(row.kind, [row.num_bytes])
        for batch in _batches(_old_files()):
            totals.add(repository.UNREFERENCED, [file.num_bytes for file in service.without_row(session, batch)])


def _old_files() -> Iterator[StoredFile]:
    """Return the files in the store except recent ones, whose rows may not have been committed yet."""
    oldest = settings().keep_unreferenced_seconds
    return (file for file in store().files() if file.age_seconds > oldest)


def _batches(items: Iterable[T]) -> Iterator[list[T]]:
    iterator = iter(items)
    while batch := list(itertools.islice(iterator, _BATCH)):
        yield batch
