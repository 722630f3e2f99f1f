"""A file that is hashed while it is read, so that its digest costs no further reading."""

import hashlib
import os
from pathlib import Path
from typing import BinaryIO

from fedssl.artifacts.store import require_digest

_CHUNK = 1 << 20


class HashedFile:
    """An open file that is read from its first byte to its last. The file may still grow."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._hash = hashlib.sha256()
        self._position = 0

    def read(self, num_bytes: int) -> bytes:
        """Return the next bytes; fewer only at the end of the file."""
        data = self._file.read(num_bytes)
        self._hash.update(data)
        self._position += len(data)
        return data

    def seek(self, position: int) -> None:
        """Read and hash everything up to a position, which must not lie behind."""
        assert position >= self._position, "the file is read once"
        while self._position < position and self.read(min(_CHUNK, position - self._position)):
            pass

    def is_at(self, path: Path) -> bool:
        """Return whether a path is that of this file, and not of another one that has its name now."""
        return os.path.samestat(os.fstat(self._file.fileno()), path.stat())

    def require(self, digest: str) -> None:
        """Read the rest. Raise DigestMismatch unless this is the digest of the whole file."""
        while self.read(_CHUNK):
            pass
        require_digest(self._hash.hexdigest(), digest)
