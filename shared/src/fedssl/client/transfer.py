"""Artifacts over HTTP: streamed from and to files, in constant memory, with their sha256 checked."""

import hashlib
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

import httpx

from fedssl.client.connection import Connection, Params
from fedssl.client.errors import ApiError, BadAnswer, Unreachable
from fedssl.client.retry import Backoff, Retry, is_temporary, with_retries
from fedssl.errors import ArtifactTooLarge, DigestMismatch

CHUNK_BYTES = 1 << 20

OnBytes = Callable[[int], None]
"""Called with how many bytes of the file have gone over the line; what it raises ends the transfer."""

UPLOAD_ANSWER_SECONDS = 120.0  # the coordinator checks and syncs what it received before it answers


def download(
    connection: Connection,
    path: str,
    destination: Path,
    *,
    digest: str | None = None,
    max_bytes: int | None = None,
    params: Params | None = None,
    retry: Retry | None = None,
    on_bytes: OnBytes = lambda count: None,
) -> str:
    """Fetch an artifact into `destination`, which appears whole or not at all, and return its digest.

    `digest` None: the one that the answer's ETag names. A broken connection is taken up again where it broke; the time
    that `retry` allows counts from the last byte. Raises ArtifactTooLarge above `max_bytes`, DigestMismatch and
    ClientError.
    """
    destination.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=destination.parent, prefix=f".{destination.name}.")
    part = Path(name)
    try:
        with os.fdopen(descriptor, "w+b") as file:
            transfer = _Download(connection, path, params, file, digest, max_bytes, on_bytes)
            transfer.run(Backoff(retry or connection.retry))
            file.flush()
            os.fsync(file.fileno())
        part.chmod(0o644)
        part.replace(destination)
    finally:
        with suppress(FileNotFoundError):
            part.unlink()
    return transfer.hash.hexdigest()


def upload(
    connection: Connection,
    path: str,
    source: Path,
    *,
    params: Params | None = None,
    retry: Retry | None = None,
    on_bytes: OnBytes = lambda count: None,
) -> None:
    """Send a file from disk. Raises ClientError."""
    size = source.stat().st_size
    headers = {"Content-Length": str(size), "Content-Type": "application/octet-stream"}

    def attempt() -> None:
        with (
            source.open("rb") as file,
            connection.stream(
                "PUT",
                path,
                params=params,
                headers=headers,
                content=_chunks(file, on_bytes),
                timeout=max(connection.timeout, UPLOAD_ANSWER_SECONDS),
            ) as response,
        ):
            response.read()

    with_retries(attempt, retry or connection.retry)


class _Download:
    """One file on its way: what has arrived stays, and the next attempt asks for the rest."""

    def __init__(
        self,
        connection: Connection,
        path: str,
        params: Params | None,
        file: BinaryIO,
        digest: str | None,
        max_bytes: int | None,
        on_bytes: OnBytes,
    ) -> None:
        self.hash = hashlib.sha256()
        self._connection = connection
        self._path = path
        self._params = params
        self._file = file
        self._expected = digest
        self._max_bytes = max_bytes
        self._on_bytes = on_bytes
        self._etag: str | None = None
        self._size = 0

    def run(self, backoff: Backoff) -> None:
        while True:
            before = self._size
            try:
                self._attempt()
                break
            except (Unreachable, ApiError) as error:
                if not is_temporary(error):
                    raise
                if self._size > before:
                    backoff.progress()
                backoff.wait(error)
        expected = self._expected or (self._etag or "").strip('"')
        if self.hash.hexdigest() != expected:
            raise DigestMismatch(
                f"{self._path} came with sha256 {self.hash.hexdigest()}, not {expected or 'one that an ETag named'}: "
                "the bytes were changed on the way or in the coordinator's store; try again"
            )

    def _attempt(self) -> None:
        headers = {"Accept-Encoding": "identity"}
        if self._size and (self._etag or self._expected):
            headers["Range"] = f"bytes={self._size}-"
            if self._etag:
                headers["If-Range"] = self._etag
        with self._connection.stream("GET", self._path, params=self._params, headers=headers) as response:
            self._place(response)
            self._check_size(self._size + int(response.headers.get("Content-Length") or 0))
            for chunk in response.iter_raw():
                self._check_size(self._size + len(chunk))
                self._file.write(chunk)
                self.hash.update(chunk)
                self._size += len(chunk)
                self._on_bytes(self._size)

    def _place(self, response: httpx.Response) -> None:
        """Go on where the last attempt stopped, or begin anew if that is what the coordinator sends."""
        if response.status_code == 206:
            if response.headers.get("Content-Range", "").startswith(f"bytes {self._size}-"):
                return
            raise BadAnswer(f"{self._path}: another range came than the one asked for")
        self._etag = response.headers.get("ETag")
        self._file.seek(0)
        self._file.truncate()
        self.hash, self._size = hashlib.sha256(), 0

    def _check_size(self, size: int) -> None:
        if self._max_bytes is not None and size > self._max_bytes:
            raise ArtifactTooLarge(f"{self._path} has more than the {self._max_bytes} bytes that the plan allows for")


def _chunks(file: BinaryIO, on_bytes: OnBytes) -> Iterator[bytes]:
    while chunk := file.read(CHUNK_BYTES):
        yield chunk
        on_bytes(file.tell())
