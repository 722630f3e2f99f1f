"""An artifact that arrives in several requests, perhaps to several processes; in a folder one file that grows."""

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
        """Make an artifact of what is at `path`, once its digest has been verified."""
        ...


class Partial(Protocol):
    """An artifact that arrives in several requests, perhaps to several processes."""

    def part_bytes(self, num_bytes: int) -> int:
        """How much of an upload of this size is best written at once."""
        ...

    @property
    def size(self) -> int:
        """Bytes that are there; 0 before the first."""
        ...

    @property
    def written_at(self) -> float | None:
        """When the last bytes came, in seconds since 1970; None before the first."""
        ...

    def append(self, parts: Sequence[bytes | bytearray], offset: int) -> None:
        """Write the parts one after the other at the end, which must be `offset`.

        Raises OffsetMismatch, writing nothing, and OSError.
        """
        ...

    def sync(self) -> None:
        """Wait until what has arrived is on the disk, so that less is left to write in the end.

        Raises OSError if that fails. Discard what has arrived then: the kernel reports such a failure once, and a
        second attempt would look as if all bytes were on the disk.
        """
        ...

    def open(self) -> BinaryIO | None:
        """Open what has arrived for reading while more of it arrives, or return None if that cannot be done.

        Bytes that were appended successfully do not change any more.
        """
        ...

    def whole(self) -> AbstractContextManager[Whole]:
        """What has arrived, for the length of a block: what comes meanwhile does not change it."""
        ...

    def locked(self) -> AbstractContextManager[bool]:
        """Hold it against other holders; False: somebody holds it, or nothing is there."""
        ...

    def discard(self) -> None:
        """Remove what has arrived."""
        ...


class PartialFile:
    """The bytes that have arrived so far. How many there are is the file's size, so no crash can make the two differ.

    Every write names its place and is done under the file's lock: whoever writes, and however many at once, nothing is
    overwritten and nothing is left out.
    """

    def __init__(self, path: Path, adopt: Callable[[Path, str], None], make_folder: Callable[[], None]) -> None:
        self.path = path
        self._adopt = adopt
        self._make_folder = make_folder

    def part_bytes(self, num_bytes: int) -> int:
        """How much of an upload of this size is best written at once."""
        return _PART_BYTES

    @property
    def size(self) -> int:
        """Bytes that are there; 0 before the first."""
        try:
            return self.path.stat().st_size
        except FileNotFoundError:
            return 0

    @property
    def written_at(self) -> float | None:
        """When the last bytes came, in seconds since 1970; None before the first."""
        try:
            return self.path.stat().st_mtime
        except FileNotFoundError:
            return None

    def append(self, parts: Sequence[bytes | bytearray], offset: int) -> None:
        """Write the parts one after the other at the end, which must be `offset`.

        Raises OffsetMismatch, writing nothing, and OSError.
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
        """Wait until what has arrived is on the disk. Raises OSError."""
        sync(self.path)

    def open(self) -> BinaryIO | None:
        """Open the file for reading while it grows, or return None if another request has removed it."""
        try:
            return self.path.open("rb", buffering=0)
        except FileNotFoundError:
            return None

    @contextmanager
    def locked(self) -> Iterator[bool]:
        """Hold the file against writers and other holders; False: somebody holds it, or there is no file."""
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
        """The file itself: its end is where it was announced to be, so nothing goes on to it."""
        yield self

    def keep(self, digest: str) -> None:
        """Make an artifact of it, once its digest has been verified. If the disk fails, it is discarded."""
        try:
            self.sync()
        except OSError:
            self.discard()
            raise
        self._adopt(self.path, digest)

    def discard(self) -> None:
        """Remove what has arrived."""
        self.path.unlink(missing_ok=True)
