"""Files that a crash leaves with their old content or their new content, never with a part."""

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


def write_atomically(path: Path, content: bytes, *, mode: int = 0o666) -> None:
    """Replace a file's content and wait until it is on the disk. The umask limits `mode`. Raises OSError."""
    part = path.with_name(f".{path.name}.part")
    part.unlink(missing_ok=True)  # from a process that was killed
    with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)
    sync(path.parent)


@contextmanager
def exclusive_folder(path: Path) -> Iterator[Path]:
    """Create a folder for its owner only, and lock it against other workers. Raises SettingsError."""
    try:
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
        lock = (path / "lock").open("w")
    except OSError as error:
        raise SettingsError(f"cannot use {path} for the worker's state: {error.strerror}") from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise SettingsError(f"another worker uses {path}: give each worker its own state folder") from None
        yield path
