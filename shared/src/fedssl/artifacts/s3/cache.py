"""Local copies of artifacts in one folder, of bounded size; several processes may share it."""

import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from fedssl.artifacts.store import drop_old_files
from fedssl.files import sync
from fedssl.locks import lock

_ABANDONED_SECONDS = 3600.0  # without a byte more: whoever writes there writes on
_IN_USE_SECONDS = 10.0  # whoever was given a path opens it within that time


class Cache:
    """Files under their digests below `files`, what is being written below `incoming`. A file is renamed into place
    whole, so every process sees it whole or not at all."""

    def __init__(self, root: Path, max_bytes: int) -> None:
        self._files = root / "files"
        self._incoming = root / "incoming"
        self._max_bytes = max_bytes
        self._make_folders()
        self.drop_abandoned(_ABANDONED_SECONDS)  # of a process that was killed for want of memory, again and again

    def find(self, digest: str, num_bytes: int) -> Path | None:
        """A copy of this size, which counts as used now."""
        path = self._files / digest
        try:
            with self._locked(shared=True):
                os.utime(path)
            return path if path.stat().st_size == num_bytes else None
        except FileNotFoundError:
            return None

    def scratch(self) -> tuple[int, Path]:
        """An empty file to write to; its descriptor and its path."""
        self._make_folders()  # it may be emptied at any time
        descriptor, name = tempfile.mkstemp(dir=self._incoming)
        return descriptor, Path(name)

    def adopt(self, path: Path, digest: str) -> Path:
        """Make a file, whose digest has been verified, a copy; the ones used longest ago make room for it."""
        sync(path)  # so that its name cannot survive a power cut that its bytes do not
        self._make_room(path.stat().st_size)
        place = self._files / digest
        os.utime(path)
        path.replace(place)
        return place

    def drop(self, digest: str) -> None:
        """Remove a copy; one that is not there is no error."""
        (self._files / digest).unlink(missing_ok=True)

    def drop_abandoned(self, seconds: float) -> list[int]:
        """Remove what processes that were killed have left, this old at least; the sizes in bytes of what was."""
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
        """Whether it is gone now; not where somebody has just asked for it."""
        with self._locked(shared=False), suppress(FileNotFoundError):
            if _is_in_use(path.stat().st_mtime):
                return False
            path.unlink()  # whoever has it open keeps it
        return True

    @contextmanager
    def _locked(self, *, shared: bool) -> Iterator[None]:
        """Between threads and processes: a copy that was found is marked as used before it is judged, or not found."""
        descriptor = os.open(self._files, os.O_RDONLY)
        try:
            lock(descriptor, shared=shared)
            yield
        finally:
            os.close(descriptor)


def _is_in_use(used_at: float) -> bool:
    return time.time() - used_at < _IN_USE_SECONDS
