"""Expires uploads, each in a short transaction of its own."""

from datetime import datetime, timedelta

from fedssl_coordinator.core.db import transaction
from fedssl_coordinator.core.settings import settings
from fedssl_coordinator.core.store import store
from fedssl_coordinator.storage.uploads import partial_files, repository


def expire_uploads(now: datetime) -> list[int]:
    """Delete uploads that have received no bytes for `FEDSSL_UPLOAD_SECONDS`, and partial files without an upload.

    Safe to repeat at any time. What the store fails to remove stays for the next call. Returns the size of each partial
    file that was removed.
    """
    limit = now - timedelta(seconds=settings().upload_seconds)
    removed: list[int] = []
    with transaction() as session:
        old = repository.ids_begun_before(session, limit)
    for upload_id in old:
        # One short transaction per upload: its sender may have returned, and waits for the row's lock.
        with partial_files.left_over(upload_id.hex), transaction() as session:
            upload = repository.locked_if_idle(session, upload_id)
            if upload is not None and partial_files.last_progress(upload) < limit:
                removed += partial_files.remove(partial_files.of(upload_id))
                repository.remove(session, upload_id)
    # A partial file is created only after its row is committed. The names are read before the rows are, so a name
    # without a row belongs to no upload.
    names = set(store().partials())
    with transaction() as session:
        names -= {known.hex for known in repository.all_ids(session)}
    for name in names:
        with partial_files.left_over(name):
            removed += partial_files.remove(store().partial(name))
    return removed
