"""Local copies of artifacts in one folder, of bounded size, which several processes may share."""

import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from fedssl.artifacts.store import drop_old_files
from fedssl.files import sync
from fedssl.locks import lock

_ABANDONED_SECONDS = 3600.0  # without another byte; a live process keeps writing
_IN_USE_SECONDS = 10.0  # a caller that was given a path opens it within this time


class Cache:
    """Files under their digests below `files`, and those that are being written below `incoming`.

    A file is renamed into place when it is complete, so every process sees it whole or not at all.
    """

    def __init__(self, root: Path, max_bytes: int) -> None:
        self._files = root / "files"
        self._incoming = root / "incoming"
        self._max_bytes = max_bytes
        self._make_folders()
        self.drop_abandoned(_ABANDONED_SECONDS)  # left by a process that was killed repeatedly for lack of memory

    def find(self, digest: str, num_bytes: int) -> Path | None:
        """Return a copy of this size, and mark it as used now, or return None if there is none."""
        path = self._files / digest
        try:
            with self._locked(shared=True):
                os.utime(path)
            return path if path.stat().st_size == num_bytes else None
        except FileNotFoundError:
            return None

    def scratch(self) -> tuple[int, Path]:
        """Create an empty file to write to, and return its descriptor and its path."""
        self._make_folders()  # it may be emptied at any time
        descriptor, name = tempfile.mkstemp(dir=self._incoming)
        return descriptor, Path(name)

    def adopt(self, path: Path, digest: str) -> Path:
        """Make a file, whose digest has been verified, a copy. Removes the least recently used copies to make room."""
        sync(path)  # so that its name cannot survive a power failure that its bytes do not
        self._make_room(path.stat().st_size)
        place = self._files / digest
        os.utime(path)
        path.replace(place)
        return place

    def drop(self, digest: str) -> None:
        """Remove a copy. It is not an error if it does not exist."""
        (self._files / digest).unlink(missing_ok=True)

    def drop_abandoned(self, seconds: float) -> list[int]:
        """Remove what killed processes left, if it is older than `seconds`, and return the sizes in bytes."""
        return drop_old_files(self._incoming, seconds)

    def _make_folders(self) -> None:
        for folder in (self._files, self._incoming):
            folder.mkdir(parents=True, exist_ok=True)

    def _make_room(self, num_bytes: int) -> None:
        known = []
        for path in self._files.iterdir():
            with suppress(FileNotFoundError):
                about = path.stat()
                known.append((about.st_mtime, about.st_size, path))
        excess = sum(size for _, size, _ in known) + num_bytes - self._max_bytes
        for used_at, size, path in sorted(known):
            if excess <= 0 or _is_in_use(used_at):
                return
            if self._evicted(path):
                excess -= size

    def _evicted(self, path: Path) -> bool:
        """Remove a copy unless it was just requested, and return whether it no longer exists."""
        with self._locked(shared=False), suppress(FileNotFoundError):
            if _is_in_use(path.stat().st_mtime):
                return False
            path.unlink()  # a process that has it open keeps it
        return True

    @contextmanager
    def _locked(self, *, shared: bool) -> Iterator[None]:
        """Lock against threads and processes, so that a copy that is found is marked before its eviction is decided."""
        descriptor = os.open(self._files, os.O_RDONLY)
        try:
            lock(descriptor, shared=shared)
            yield
        finally:
            os.close(descriptor)


def _is_in_use(used_at: float) -> bool:
    return time.time() - used_at < _IN_USE_SECONDS
