"""A file that is hashed while it is read, so that its digest needs no second read."""

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

from fedssl.artifacts.store import require_digest

_CHUNK = 1 << 18


class HashedFile:
    """An open file that is hashed from its first byte to its last. The file may still grow."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._hash = hashlib.sha256()
        self._position = 0
        self._scratch = bytearray(_CHUNK)

    def read(self, num_bytes: int) -> bytes:
        """Return the next `num_bytes`, or fewer at the end of the file."""
        data = self._file.read(num_bytes)
        self._hash.update(data)
        self._position += len(data)
        return data

    def seek(self, position: int) -> None:
        """Read and hash everything up to a position, which must not be before the current one."""
        assert position >= self._position, "the file is read once"
        while self._position < position and self._skip(position - self._position):
            pass

    def add(self, parts: Sequence[bytes | bytearray]) -> None:
        """Hash the next bytes of the file without reading them: the caller has just appended them to it."""
        for part in parts:
            self._hash.update(part)
            self._position += len(part)
        self._file.seek(self._position)

    def is_at(self, path: Path) -> bool:
        """Return whether the path leads to this file, and not to another one that has replaced it."""
        return os.path.samestat(os.fstat(self._file.fileno()), path.stat())

    def require(self, digest: str) -> None:
        """Read the rest. Raise DigestMismatch unless this is the digest of the whole file."""
        while self._skip(_CHUNK):
            pass
        require_digest(self._hash.hexdigest(), digest)

    def _skip(self, num_bytes: int) -> int:
        """Read at most `num_bytes` into the same memory each time, and hash them. Returns how many; 0 at the end."""
        count: int = self._file.readinto(memoryview(self._scratch)[:num_bytes])  # type: ignore[attr-defined]
        self._hash.update(memoryview(self._scratch)[:count])
        self._position += count
        return count
