"""Reads files, and compares their bytes with their digest in the same pass.

The bytes that are used are those that were hashed, because this process has them in its memory. A memory map would not
ensure that: the kernel may read its pages from the disk again later. Data sets are read in the same way, without torch.
"""

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from fedssl.errors import ArtifactDamaged

CHUNK = 1 << 20  # hashed while it is still in the processor's cache


class CheckedFile:
    """An open file that is read once, from its first byte to its last, and hashed on the way."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._hash = hashlib.sha256()
        self.size = os.fstat(file.fileno()).st_size
        self.position = 0

    def read_into(self, target: NDArray[np.uint8]) -> None:
        """Fill a one-dimensional array with the next bytes. If the file ends first, the rest of it stays as it is."""
        view = target.data
        while view:
            count = self._file.readinto(view[:CHUNK])  # type: ignore[attr-defined]
            if not count:
                return
            self._hash.update(view[:count])
            self.position += count
            view = view[count:]

    def read(self, num_bytes: int) -> NDArray[np.uint8]:
        """Return the next bytes: at most `num_bytes`, and not more than the file had when it was opened."""
        target = np.empty(max(0, min(num_bytes, self.size - self.position)), np.uint8)
        self.read_into(target)
        return target

    def require(self, digest: str) -> None:
        """Read the rest. Raise ArtifactDamaged unless the digest is that of all bytes from the first to the last."""
        scratch = np.empty(CHUNK, np.uint8)
        before = -1
        while before != self.position:
            before = self.position
            self.read_into(scratch)
        if (found := self._hash.hexdigest()) != digest:
            raise ArtifactDamaged(f"the file of artifact {digest} has other bytes: their sha256 is {found}")


@contextmanager
def checked_file(path: Path) -> Iterator[CheckedFile]:
    """Open a file to be read once. Call `require` before you use anything that was read."""
    with path.open("rb", buffering=0) as file:
        yield CheckedFile(file)


def read_checked(path: Path, digest: str) -> NDArray[np.uint8]:
    """Return all bytes of a file. Raises ArtifactDamaged if they do not have this digest."""
    with checked_file(path) as file:
        whole = file.read(file.size)
        file.require(digest)
    return whole
