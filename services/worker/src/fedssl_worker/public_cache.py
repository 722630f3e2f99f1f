"""Registered public images on this machine, by digest: fetched once, kept between runs and starts, bounded in bytes."""

import os
from collections.abc import Callable
from pathlib import Path

from fedssl.artifacts.store import digest_of
from fedssl.client import WorkerClient
from fedssl.errors import ArtifactTooLarge, DataError


class PublicCache:
    """Files of public images below one folder. Those that were used longest ago make room for new ones.

    One that was half fetched when the worker ended is fetched to its end; it counts as the others do.

    `max_bytes` 0: nothing is fetched, and a run that needs registered images is declined.
    """

    def __init__(self, client: WorkerClient, folder: Path, max_bytes: int) -> None:
        self._client = client
        self._folder = folder
        self._max_bytes = max_bytes
        self._intact: set[str] = set()

    def path(self, digest: str, on_bytes: Callable[[int], None]) -> Path:
        """A file of these very images, fetched where it is not here; `on_bytes` may raise Cancelled meanwhile.

        Raises DataError where the data owner does not allow it, DigestMismatch and ClientError.
        """
        if not self._max_bytes:
            raise DataError(
                "this worker fetches no public images (--max-public-bytes 0): name some in public_data that every "
                "machine finds by name"
            )
        path = self._folder / f"{digest}.safetensors"
        if digest not in self._intact or not path.is_file():
            if not path.is_file() or digest_of(path) != digest:
                path.unlink(missing_ok=True)
                self._fetch(digest, path, on_bytes)
            self._intact.add(digest)
        os.utime(path)
        self._make_room(path.stat().st_size, digest)
        return path

    def _fetch(self, digest: str, path: Path, on_bytes: Callable[[int], None]) -> None:
        try:
            # Before the bytes come: the disk may be no larger than what the owner allows.
            self._client.download(digest, path, self._max_bytes, on_bytes, lambda size: self._make_room(size, digest))
        except ArtifactTooLarge:
            raise DataError(
                f"the run's public images take more than the {self._max_bytes} bytes that this worker keeps: raise its "
                "--max-public-bytes, or register fewer"
            ) from None

    def _make_room(self, num_bytes: int, digest: str) -> None:
        """For so many bytes of this digest, what is here of them already included."""
        others = [path for path in self._folder.iterdir() if digest not in path.name]
        for path in sorted(others, key=lambda path: path.stat().st_mtime, reverse=True):
            num_bytes += path.stat().st_size
            if num_bytes > self._max_bytes:
                path.unlink()
