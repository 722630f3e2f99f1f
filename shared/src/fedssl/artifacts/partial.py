"""An artifact that arrives in several requests, perhaps at several processes. In a folder it is a growing file."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import BinaryIO, Protocol

from fedssl.errors import OffsetMismatch
from fedssl.files import sync
from fedssl.locks import lock, try_lock

_PART_BYTES = 1 << 20


class Whole(Protocol):
    """Everything that has arrived, in one local file."""

    @property
    def path(self) -> Path: ...

    def keep(self, digest: str) -> None:
        """Store the file at `path` as an artifact. Its digest must have been verified."""
        ...


class Partial(Protocol):
    """An artifact that arrives in several requests, perhaps at several processes."""

    def part_bytes(self, num_bytes: int) -> int:
        """Return how many bytes of an upload of this size are best written at once."""
        ...

    @property
    def size(self) -> int:
        """Return how many bytes have arrived."""
        ...

    @property
    def written_at(self) -> float | None:
        """Return when the last bytes arrived, in seconds since 1970, or None if none have arrived."""
        ...

    def append(self, parts: Sequence[bytes | bytearray], offset: int) -> None:
        """Write the parts one after the other at the end, which must be `offset`.

        Raises OffsetMismatch, in which case nothing is written, and OSError.
        """
        ...

    def sync(self) -> None:
        """Sync the bytes that have arrived to the disk, so that less remains to be synced at the end.

        Raises OSError if that fails. Then discard what has arrived: the kernel reports such a failure only once, and a
        second attempt would seem to succeed.
        """
        ...

    def open(self) -> BinaryIO | None:
        """Open what has arrived for reading while more of it arrives, or return None if that cannot be done.

        Bytes that were appended successfully no longer change.
        """
        ...

    def whole(self) -> AbstractContextManager[Whole]:
        """Yield what has arrived, for the duration of a block. Bytes that arrive meanwhile do not change it."""
        ...

    def locked(self) -> AbstractContextManager[bool]:
        """Lock it against other holders. Yields False if another one holds it, or nothing has arrived."""
        ...

    def discard(self) -> None:
        """Remove what has arrived."""
        ...


class PartialFile:
    """A file with the bytes that have arrived so far. Their number is its size, so a crash cannot make the two differ.

    Every write states its offset and is done under the file's lock: however many processes write at once, nothing is
    overwritten and nothing is left out.
    """

    def __init__(self, path: Path, adopt: Callable[[Path, str], None], make_folder: Callable[[], None]) -> None:
        self.path = path
        self._adopt = adopt
        self._make_folder = make_folder

    def part_bytes(self, num_bytes: int) -> int:
        """Return how many bytes of an upload of this size are best written at once."""
        return _PART_BYTES

    @property
    def size(self) -> int:
        """Return how many bytes have arrived."""
        try:
            return self.path.stat().st_size
        except FileNotFoundError:
            return 0

    @property
    def written_at(self) -> float | None:
        """Return when the last bytes arrived, in seconds since 1970, or None if none have arrived."""
        try:
            return self.path.stat().st_mtime
        except FileNotFoundError:
            return None

    def append(self, parts: Sequence[bytes | bytearray], offset: int) -> None:
        """Write the parts one after the other at the end, which must be `offset`.

        Raises OffsetMismatch, in which case nothing is written, and OSError.
        """
        if offset == 0:
            self._make_folder()
        try:
            descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND | (os.O_CREAT if offset == 0 else 0), 0o600)
        except FileNotFoundError:
            raise OffsetMismatch(f"no bytes have arrived yet: continue at byte 0, not at {offset}") from None
        with os.fdopen(descriptor, "ab", buffering=0) as file:
            lock(file)
            size = os.fstat(descriptor).st_size
            if size != offset:
                raise OffsetMismatch(f"{size} bytes have arrived: continue at byte {size}, not at {offset}")
            for part in parts:
                rest = memoryview(part)
                while rest:
                    rest = rest[file.write(rest) :]

    def sync(self) -> None:
        """Sync the bytes that have arrived to the disk. Raises OSError."""
        sync(self.path)

    def open(self) -> BinaryIO | None:
        """Open the file for reading while it grows, or return None if another request has removed it."""
        try:
            return self.path.open("rb", buffering=0)
        except FileNotFoundError:
            return None

    @contextmanager
    def locked(self) -> Iterator[bool]:
        """Lock the file against writers and other holders. Yields False if it is held, or there is no file."""
        try:
            descriptor = os.open(self.path, os.O_RDONLY)
        except FileNotFoundError:
            yield False
            return
        try:
            yield try_lock(descriptor)
        finally:
            os.close(descriptor)

    @contextmanager
    def whole(self) -> Iterator["PartialFile"]:
        """Yield the file itself. It has the announced size, so nothing is appended to it."""
        yield self

    def keep(self, digest: str) -> None:
        """Store it as an artifact. Its digest must have been verified. If the disk fails, it is discarded."""
        try:
            self.sync()
        except OSError:
            self.discard()
            raise
        self._adopt(self.path, digest)

    def discard(self) -> None:
        """Remove what has arrived."""
        self.path.unlink(missing_ok=True)
