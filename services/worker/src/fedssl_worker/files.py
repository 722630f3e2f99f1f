"""Writing files so that a crash at any moment leaves the old content or the new, never a part."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fedssl_worker.settings import SettingsError


def sync(path: Path) -> None:
    """Wait until a file's content, or a folder's names, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def exclusive_folder(path: Path) -> Iterator[Path]:
    """A folder that only its owner may look into, and that only one worker uses at a time. Raises SettingsError."""
    try:
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
        lock = (path / "lock").open("w")
    except OSError as error:
        raise SettingsError(f"cannot use {path} for the worker's state: {error.strerror}") from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise SettingsError(f"another worker uses {path}: give every worker a state folder of its own") from None
        yield path
