"""Downloads artifacts from the coordinator into files, in constant memory, and checks their sha256.

Until a file is complete, the bytes that have arrived are next to it in `.NAME.DIGEST.part`. A broken connection, an
unreachable coordinator or a killed process costs only time, because the next attempt requests the rest.
"""

import errno
import hashlib
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from glob import escape
from pathlib import Path
from typing import BinaryIO

import httpx

from fedssl.client.connection import Connection, Params, content_length
from fedssl.client.deadline import TRANSFER_BYTES_PER_SECOND
from fedssl.client.errors import ApiError, BadAnswer, ClientError, StoreUnreachable, Unreachable
from fedssl.client.retry import Retry, RetryTimer, is_temporary
from fedssl.errors import ArtifactError, ArtifactTooLarge, DigestMismatch
from fedssl.locks import try_lock

OnBytes = Callable[[int], None]
"""Called with how many bytes of the file have been transferred. An exception that it raises ends the transfer."""

OnSize = Callable[[int], None]
"""Called with the size of the whole file once it is known."""

PROGRESS_BYTES = 4096
"""An attempt that transfers fewer bytes than this makes no progress: a peer could send one byte per connection."""

_CHUNK_BYTES = 1 << 20
_DIGEST = re.compile(r"[0-9a-f]{64}")
_UNKNOWN = "unknown"


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
    on_size: OnSize = lambda size: None,
) -> str:
    """Download an artifact to `destination`, which appears only when it is complete, and return its digest.

    If `digest` is None, the response's ETag names it. The time that `retry` allows counts from the last attempt that
    made progress. Raises ArtifactTooLarge above `max_bytes`, DigestMismatch, ClientError, and OSError if the disk has
    too little room.
    """
    destination.parent.mkdir(parents=True, exist_ok=True)
    with _part(destination, digest, is_limited=max_bytes is not None) as part:
        transfer = _Download(connection, path, params, part, digest, max_bytes, on_bytes, on_size)
        transfer.run(RetryTimer(retry or connection.retry))
        part.file.flush()
        os.fsync(part.file.fileno())
        part.path.chmod(0o644)
        part.path.replace(destination)
    return transfer.hash.hexdigest()


class _Part:
    """The bytes of one file that have arrived, in this process or before it."""

    def __init__(self, destination: Path, path: Path, file: BinaryIO) -> None:
        self.path = path
        self.file = file
        self._destination = destination

    @property
    def digest(self) -> str | None:
        """Return the digest of the whole file that begins with these bytes, or None if it is not known."""
        name = self.path.name.removesuffix(".part").rpartition(".")[2]
        return name if _DIGEST.fullmatch(name) else None

    def empty(self, digest: str | None) -> None:
        """Drop the bytes, and start from scratch with those of this digest."""
        self.file.seek(0)
        self.file.truncate()
        self.path = self.path.rename(_place(self._destination, digest))


@contextmanager
def _part(destination: Path, digest: str | None, *, is_limited: bool) -> Iterator[_Part]:
    """Open the part of a file, and lock it for this process. It is kept if the rest may still arrive.

    It is also removed if the disk fails, unless the file's size is limited: it could have filled the disk. Raises
    ClientError if another process has locked it.
    """
    path = _place(destination, digest)
    if digest is None:
        path = next(iter(sorted(destination.parent.glob(f".{escape(destination.name)}.*.part"))), path)
    with os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o600), "r+b") as file:
        if not try_lock(file):
            raise ClientError(f"another process is fetching {destination}: wait until it has ended")
        part = _Part(destination, path, file)
        try:
            yield part
        except BaseException as error:
            is_lasting = isinstance(error, ApiError) and not is_temporary(error)
            is_lasting |= isinstance(error, ArtifactError) or (isinstance(error, OSError) and not is_limited)
            if is_lasting or not os.fstat(file.fileno()).st_size:
                with suppress(FileNotFoundError):
                    part.path.unlink()
            raise


def _place(destination: Path, digest: str | None) -> Path:
    return destination.parent / f".{destination.name}.{digest or _UNKNOWN}.part"


class _Download:
    """The download of one file. Bytes that have arrived are kept, and the next attempt requests the rest."""

    def __init__(
        self,
        connection: Connection,
        path: str,
        params: Params | None,
        part: _Part,
        digest: str | None,
        max_bytes: int | None,
        on_bytes: OnBytes,
        on_size: OnSize,
    ) -> None:
        self._connection = connection
        self._path = path
        self._params = params
        self._part = part
        self._expected = digest
        self._max_bytes = max_bytes
        self._on_bytes = on_bytes
        self._on_size = on_size
        self._etag: str | None = None
        self._is_resumed = False
        self._restart(keep=part.digest is not None)

    def run(self, timer: RetryTimer) -> None:
        self._is_resumed = self._size > 0
        if not self._is_resumed or self.hash.hexdigest() != self._expected:
            self._transfer(timer)
        if self._is_resumed and self.hash.hexdigest() != self._announced:
            # An earlier process left damaged bytes, or the coordinator sent some until it found its own file damaged.
            self._restart()
            self._transfer(timer)
        if self.hash.hexdigest() != self._announced:
            raise DigestMismatch(
                f"{self._path} came with sha256 {self.hash.hexdigest()}, not "
                f"{self._announced or 'one that an ETag named'}: "
                "the bytes were changed on the way or in the coordinator's store; try again"
            )

    @property
    def _announced(self) -> str | None:
        return self._expected or self._part.digest

    def _transfer(self, timer: RetryTimer) -> None:
        reached = self._size
        while True:
            try:
                if self._attempt():
                    return
            except (Unreachable, ApiError) as error:
                if not is_temporary(error):
                    raise
                if self._size >= reached + PROGRESS_BYTES:
                    reached = self._size
                    timer.progress()
                timer.wait(error)

    def _attempt(self) -> bool:
        """Make one attempt. Returns False if another one is needed, from scratch or without the object store.

        It starts from scratch if more bytes are here than the whole file has.
        """
        headers: dict[str, str] = {}
        if self._size and (self._etag or self._expected):
            headers["Range"] = f"bytes={self._size}-"
        own = headers | ({"If-Range": self._etag} if "Range" in headers and self._etag else {})
        own, accepted = self._connection.offer_direct(own)
        with self._connection.stream(
            "GET",
            self._path,
            params=self._params,
            headers=own,
            accepted=(*accepted, 416),
            bytes_per_second=TRANSFER_BYTES_PER_SECOND,
        ) as response:
            if response.status_code != 307:
                return self._take(response, response.headers.get("ETag"))
            location, etag = response.headers.get("Location", ""), response.headers.get("ETag")
        if self._etag not in (None, etag):  # it is another artifact now, and none of its bytes are here
            headers.pop("Range", None)
        # The address belongs to this artifact only, so a range of it needs no condition.
        try:
            with self._connection.direct_transfer.stream("GET", location, headers=headers, accepted=(416,)) as response:
                return self._take(response, etag)
        except StoreUnreachable:
            return False

    def _take(self, response: httpx.Response, etag: str | None) -> bool:
        """Read a response to its end. Returns False if the range was refused. `etag` names the whole file."""
        if response.status_code == 416:
            if not self._size:
                raise BadAnswer(f"{self._path} was refused as a range (416), but the whole file was requested")
            self._restart()
            return False
        self._follow(response, etag)
        rest = content_length(response)
        self._check_size(self._size + rest)
        if rest:
            self._on_size(self._size + rest)
            _require_room(self._part.path, rest)
        for chunk in response.iter_raw():
            self._check_size(self._size + len(chunk))
            self._part.file.write(chunk)
            self.hash.update(chunk)
            self._size += len(chunk)
            self._on_bytes(self._size)
        return True

    def _follow(self, response: httpx.Response, etag: str | None) -> None:
        """Continue where the last attempt stopped, or start from scratch if the response has the whole file."""
        sent = response.headers.get("Content-Range", "")
        if response.status_code == 206 or sent:  # some object stores send a range with status 200
            if sent.startswith(f"bytes {self._size}-"):
                self._is_resumed = True
                return
            raise BadAnswer(f"{self._path}: the response has another range than the requested one")
        digest = (etag or "").strip('"')
        self._restart()
        self._part.empty(self._expected or (digest if _DIGEST.fullmatch(digest) else None))
        self._etag = etag

    def _restart(self, *, keep: bool = False) -> None:
        """Read and hash the bytes that are here if `keep`, or else drop them."""
        self.hash, self._size = hashlib.sha256(), 0
        file = self._part.file
        file.seek(0)
        if not keep:
            file.truncate()
            return
        while chunk := file.read(_CHUNK_BYTES):
            self.hash.update(chunk)
            self._size += len(chunk)
        if self._size:
            self._etag = f'"{self._part.digest}"'

    def _check_size(self, size: int) -> None:
        if self._max_bytes is not None and size > self._max_bytes:
            raise ArtifactTooLarge(f"{self._path} has more than the {self._max_bytes} bytes that the plan allows for")


def _require_room(path: Path, num_bytes: int) -> None:
    """Raise OSError if the file's disk has no room for `num_bytes` more."""
    free = shutil.disk_usage(path.parent).free
    if num_bytes > free:
        reason = f"{num_bytes:,} bytes will arrive, and the disk has room for {free:,}: make room, or choose another"
        raise OSError(errno.ENOSPC, reason, str(path.parent))
