"""The worker's own folder, which one worker at a time may use."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fedssl.locks import try_lock
from fedssl_worker.settings import SettingsError


@contextmanager
def exclusive_folder(path: Path) -> Iterator[Path]:
    """Create a folder for its owner only, and lock it against other workers. Raises SettingsError."""
    try:
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
        lock = (path / "lock").open("wb")
    except OSError as error:
        raise SettingsError(f"cannot use {path} for the worker's state: {error.strerror}") from None
    with lock:
        if not try_lock(lock):
            raise SettingsError(f"another worker uses {path}: give each worker its own state folder")
        yield path
