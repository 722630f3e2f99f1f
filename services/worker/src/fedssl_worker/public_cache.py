"""A bounded cache of registered public images on this machine, by digest, for all runs and starts."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from fedssl.client import WorkerClient
from fedssl.errors import ArtifactDamaged, ArtifactTooLarge, DataError

T = TypeVar("T")


class PublicCache:
    """Files of public images in one folder. The least recently used ones are removed to make room.

    A file whose download was interrupted counts too, and its download is continued.

    With `max_bytes` 0 nothing is fetched, and a run that needs registered images is declined.
    """

    def __init__(self, client: WorkerClient, folder: Path, max_bytes: int) -> None:
        self._client = client
        self._folder = folder
        self._max_bytes = max_bytes

    def read(self, digest: str, read: Callable[[Path], T], on_bytes: Callable[[int], None]) -> T:
        """Return what `read` makes of the file, which it compares with the digest; a damaged file is fetched again.

        Raises what `path` raises.
        """
        path = self.path(digest, on_bytes)
        try:
            return read(path)
        except ArtifactDamaged:
            path.unlink()
            return read(self.path(digest, on_bytes))

    def path(self, digest: str, on_bytes: Callable[[int], None]) -> Path:
        """Return the file of these images, and fetch it if it is not there; `on_bytes` may raise Cancelled.

        Raises DataError if the data owner does not allow the download, DigestMismatch and ClientError.
        """
        if not self._max_bytes:
            raise DataError(
                "this worker fetches no public images (--max-public-bytes 0): use a known data set in public_data, "
                "because every machine has those"
            )
        path = self._folder / f"{digest}.safetensors"
        if not path.is_file():
            self._fetch(digest, path, on_bytes)
        os.utime(path)
        self._make_room(path.stat().st_size, digest)
        return path

    def _fetch(self, digest: str, path: Path, on_bytes: Callable[[int], None]) -> None:
        try:
            # Make room before the bytes arrive: the disk may have no more space than the owner allows.
            self._client.download(digest, path, self._max_bytes, on_bytes, lambda size: self._make_room(size, digest))
        except ArtifactTooLarge:
            raise DataError(
                f"the run's public images exceed the {self._max_bytes} bytes that this worker may keep: raise its "
                "--max-public-bytes, or register fewer images"
            ) from None

    def _make_room(self, num_bytes: int, digest: str) -> None:
        """Remove other files so that `num_bytes` of this digest fit. They include bytes that are here already."""
        others = [path for path in self._folder.iterdir() if digest not in path.name]
        for path in sorted(others, key=lambda path: path.stat().st_mtime, reverse=True):
            num_bytes += path.stat().st_size
            if num_bytes > self._max_bytes:
                path.unlink()
