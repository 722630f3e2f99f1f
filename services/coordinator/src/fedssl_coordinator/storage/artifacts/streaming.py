"""Streams artifacts in and out, one mebibyte at a time: neither direction holds a whole large artifact in memory.

A thread reads or writes one mebibyte while the event loop sends or receives the next one.
"""

import asyncio
import hashlib
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Any, BinaryIO

import structlog
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from fedssl.artifacts.finite import InMemory, check_finite, check_finite_in
from fedssl.artifacts.header import LENGTH_BYTES, Header, header_length
from fedssl.artifacts.store import Writer
from fedssl.errors import ArtifactDamaged, ArtifactError, ArtifactNotFound, ArtifactTooLarge, OffsetMismatch
from fedssl_coordinator.core.openapi import problems
from fedssl_coordinator.core.problems import ProblemError
from fedssl_coordinator.core.settings import settings
from fedssl_coordinator.core.store import store
from fedssl_coordinator.core.threads import run_in_thread
from fedssl_coordinator.http.zero_copy import ZERO_COPY
from fedssl_coordinator.storage.artifacts.damage import set_aside
from fedssl_coordinator.storage.artifacts.memory import MemoryResponse, RecentArtifacts
from fedssl_coordinator.storage.artifacts.service import UploadPermit, check_announced

CHUNK = 1 << 20
SYNC_BYTES = 16 << 20
"""After how many bytes of an upload the written ones are synced, while more bytes arrive."""

DOWNLOAD: dict[int | str, dict[str, Any]] = {
    200: {"content": {"application/octet-stream": {}}},
    206: {"content": {"application/octet-stream": {}}, "description": "The range that was requested."},
    304: {"description": "`If-None-Match` names these bytes."},
    307: {"description": "The object store's address, if `Accept-Direct: 1` was sent."},
    **problems(416),
}
"""The responses of a route that answers GET with `artifact_response`."""

DOWNLOAD_HEAD: dict[int | str, dict[str, Any]] = {status: DOWNLOAD[status] for status in (200, 304)}

Parts = list[bytes | bytearray]

_LARGE_CHUNK = 1 << 14
_LINK_SECONDS = 900
_recent = RecentArtifacts()
_CHECKED_SECONDS = 60.0
_MOST_CHECKED = 1000
_checked_at: dict[tuple[str, str], float] = {}  # when a download last began to compare a file's version with its digest
_RANGE = re.compile(r"bytes=(\d{1,17})-(\d{1,17})?", re.ASCII)

log = structlog.get_logger(__name__)


async def receive(permit: UploadPermit, digest: str, content_length: int | None, body: AsyncIterator[bytes]) -> int:
    """Store an upload that matches the permit, and return its size in bytes.

    The header is checked before the body is read, the digest and the values afterwards. Raises ProblemError; nothing
    is stored then.
    """
    if content_length is None:
        detail = "send Content-Length, the size of the safetensors file in bytes, and no chunked encoding"
        raise permit.refusal("length-required", detail)
    check_announced(permit, content_length)
    with refusals(permit):
        if content_length < CHUNK:  # it is in memory until all of it has arrived
            header, whole = await _receive_into(None, permit, content_length, body)
            await run_in_thread(_store, whole, digest, header)
            return content_length
        with store().writer() as writer:
            header, rest = await _receive_into(writer, permit, content_length, body)
            await run_in_thread(_finish, writer, rest, digest, header)
    return content_length


def _store(parts: Parts, digest: str, header: Header) -> None:
    """Check an upload that is in memory, and store it. Raises ArtifactError."""
    whole = b"".join(parts)
    with store().writer() as writer:
        writer.write(whole)
        writer.verify(digest)  # first, as in `_finish`
        check_finite_in(InMemory(whole), header)
        writer.commit(digest)


def add_chunk(parts: Parts, chunk: bytes) -> None:
    """Add the next bytes of a body to those that will be written together.

    Large chunks are not joined, because copying them into new memory takes longer than writing them one by one. Small
    ones are, so that a sender of single bytes does not cause as many objects and writes.
    """
    if len(chunk) >= _LARGE_CHUNK or not parts:
        parts.append(chunk)
    elif isinstance(last := parts[-1], bytearray):
        last += chunk
    else:
        parts.append(bytearray(chunk))


def _write(writer: Writer, parts: Parts) -> None:
    for part in parts:
        writer.write(part)


def _finish(writer: Writer, rest: Parts, digest: str, header: Header) -> None:
    """Write the last bytes of an upload, check all of it, and store it. Raises ArtifactError."""
    _write(writer, rest)
    writer.verify(digest)  # first: damaged bytes would give misleading errors about the tensors
    writer.flush()
    check_finite(writer.path, header)
    writer.commit(digest)


@contextmanager
def refusals(permit: UploadPermit) -> Iterator[None]:
    """Turn errors of an upload into the problem that its sender receives."""
    try:
        yield
    except OffsetMismatch as error:
        raise ProblemError("offset-mismatch", str(error)) from None
    except ArtifactTooLarge as error:
        raise permit.refusal("artifact-too-large", str(error)) from None
    except ArtifactError as error:
        raise permit.refusal("artifact-rejected", str(error)) from None
    except ClientDisconnect:
        raise ProblemError("invalid-request", "the connection was lost: send the artifact again") from None
    except OSError as error:
        log.error("store.failed", error=repr(error))
        detail = "the artifact store cannot take the upload at the moment: send it again shortly"
        raise ProblemError("unavailable", detail, headers={"Retry-After": "10"}) from None


async def _receive_into(
    writer: Writer | None, permit: UploadPermit, content_length: int, body: AsyncIterator[bytes]
) -> tuple[Header, Parts]:
    """Return the header, and the last bytes, which are not written yet: all of them without a writer."""
    beginning = bytearray()
    parts: Parts = [beginning]
    header: Header | None = None
    received = written = synced = 0
    async with behind() as write, behind() as sync:
        async for chunk in body:
            received += len(chunk)
            if received > content_length:
                raise ArtifactTooLarge("more bytes arrived than Content-Length announced")
            if header is None:
                beginning += chunk
                header = checked_header(beginning, permit, content_length)
            else:
                add_chunk(parts, chunk)
            if writer is not None and header is not None and received - written >= CHUNK:
                await write(_write, writer, parts)
                written = received
                parts = []
                if written - synced >= SYNC_BYTES:
                    await sync(writer.sync)
                    synced = written
    if header is None:
        raise ArtifactError("the upload ended within its safetensors header")
    if received != content_length:
        raise ArtifactError(f"{received} bytes arrived, but {content_length} were announced: send the artifact again")
    return header, parts


@asynccontextmanager
async def behind() -> AsyncIterator[Callable[..., Awaitable[None]]]:
    """Yield a function that calls another one in a thread while its caller continues, one call at a time.

    It waits for the previous call, and raises what that raised. At the end of the block all calls have ended.
    """
    running: asyncio.Task[None] | None = None

    async def call(function: Callable[..., None], *arguments: Any) -> None:
        nonlocal running
        before, running = running, None
        if before is not None:
            await before
        running = asyncio.create_task(run_in_thread(function, *arguments))

    try:
        yield call
    except BaseException:
        if running is not None:
            with suppress(Exception):  # the first error is the one that counts
                await running
        raise
    if running is not None:
        await running


async def _ahead(parts: Iterator[bytes]) -> AsyncIterator[bytes]:
    """Yield the parts. A thread reads the next one while the caller sends the last one."""

    def read() -> bytes | None:
        return next(parts, None)

    reading = asyncio.create_task(run_in_thread(read))
    try:
        while (part := await reading) is not None:
            reading = asyncio.create_task(run_in_thread(read))
            yield part
    finally:  # the caller may have gone, and then the error of the last read is not needed
        reading.add_done_callback(lambda task: task.cancelled() or task.exception())


def checked_header(beginning: bytes | bytearray, permit: UploadPermit, num_bytes: int) -> Header | None:
    """Return the checked header of a file of `num_bytes` bytes, or None if too little of its beginning has arrived.

    Raises ArtifactError if the header does not match the permit or the size.
    """
    if len(beginning) < LENGTH_BYTES:
        return None
    end = LENGTH_BYTES + header_length(bytes(beginning[:LENGTH_BYTES]), permit.max_header_bytes)
    if len(beginning) < end:
        return None
    header = permit.checked(bytes(beginning[LENGTH_BYTES:end]))
    if header.total_bytes != num_bytes:
        raise ArtifactError(f"the header describes {header.total_bytes} bytes, but {num_bytes} were announced")
    return header


def artifact_response(digest: str, request_headers: Headers, *, method: str = "GET", direct: bool = False) -> Response:
    """Return an artifact's bytes, all of them or one range, or 304 if the caller has them.

    With `direct`, the response redirects to the object store if the settings allow it and the caller accepts it. Raises
    ProblemError if the store lacks the artifact.
    """
    try:
        return _response(digest, request_headers, method, direct=direct)
    except ArtifactNotFound as error:  # possibly removed after its size was read
        raise ProblemError("not-found", str(error)) from None


def _response(digest: str, request_headers: Headers, method: str, *, direct: bool) -> Response:
    """Return what `artifact_response` does. Raises ArtifactNotFound."""
    size, version = store().version(digest)
    etag = f'"{digest}"'
    if _names(request_headers.getlist("if-none-match"), etag):
        return Response(status_code=304, headers={"ETag": etag})
    is_redirected = direct and settings().store_direct and request_headers.get("accept-direct") == "1"
    if is_redirected and method == "GET" and (link := store().link(digest, _LINK_SECONDS)) is not None:
        return Response(status_code=307, headers={"Location": link, "ETag": etag, "Cache-Control": "no-store"})
    headers = {"ETag": etag, "Accept-Ranges": "bytes"}
    start, stop, status = 0, size, 200
    # A range only of what the caller had begun to fetch: a run's newest weights may have changed since.
    is_same = method == "GET" and request_headers.get("if-range", etag) == etag  # RFC 9110: a range only for GET
    asked = _range(request_headers.get("range", "")) if is_same else None
    if asked is not None:
        start, stop, status = asked[0], min(asked[1], size), 206
        if start >= size:
            detail = f"the artifact has {size} bytes: request a range that starts below that"
            raise ProblemError("range-not-satisfiable", detail, headers={"Content-Range": f"bytes */{size}"})
        headers["Content-Range"] = f"bytes {start}-{stop - 1}/{size}"
    headers["Content-Length"] = str(stop - start)
    if method == "HEAD":
        return Response(status_code=status, headers=headers, media_type="application/octet-stream")
    if asked is None and (held := _recent.get(digest, size, version)) is not None:
        return MemoryResponse(held, headers, "application/octet-stream")
    is_checked = asked is None and _is_check_due(digest, version)
    content = _ahead(_checked(digest, size) if is_checked else store().read(digest, start, stop))
    file = None if is_checked else store().open(digest)
    if file is None:
        return StreamingResponse(content, status, headers, "application/octet-stream")
    return _FileResponse(content, status, headers, file, start)


class _FileResponse(StreamingResponse):
    """Lets the kernel send the bytes of `file` from `start` on, if the server can, and otherwise sends `content`."""

    def __init__(
        self, content: AsyncIterator[bytes], status: int, headers: dict[str, str], file: BinaryIO, start: int
    ) -> None:
        super().__init__(content, status, headers, "application/octet-stream")
        self._file = file
        self._start = start
        self._num_bytes = int(headers["Content-Length"])

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._file as file:
            if ZERO_COPY not in scope.get("extensions", {}):
                await super().__call__(scope, receive, send)
                return
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            await send({"type": ZERO_COPY, "file": file.fileno(), "offset": self._start, "count": self._num_bytes})


def _is_check_due(digest: str, version: str) -> bool:
    """Return whether a download should compare the file with its digest: one per minute, or the first after a write.

    Its receiver compares it too. The coordinator's own check detects that the store has a damaged file.
    """
    now, last = time.monotonic(), _checked_at.get((digest, version))
    if last is not None and now - last < _CHECKED_SECONDS:
        return False
    if len(_checked_at) >= _MOST_CHECKED:
        _checked_at.clear()
    _checked_at[digest, version] = now
    return True


def _checked(digest: str, size: int) -> Iterator[bytes]:
    """Yield an artifact's bytes, and the last ones of them only if all of them have its digest.

    Otherwise it raises ArtifactDamaged, which breaks the connection, and the artifact is missing from then on. A
    range cannot be checked here: its reader has the whole file, and checks it.
    """
    whole, held = hashlib.sha256(), b""
    for chunk in store().read(digest, 0, size):
        whole.update(chunk)
        if held:
            yield held
        held = chunk
    if whole.hexdigest() != digest:
        set_aside(digest)
        raise ArtifactDamaged(f"artifact {digest} has other bytes in the store: the download was broken off")
    yield held


def _names(if_none_match: list[str], etag: str) -> bool:
    """Return whether the lines of If-None-Match name the ETag. The comparison is the weak one of RFC 9110."""
    named = [tag.strip() for line in if_none_match for tag in line.split(",")]
    return "*" in named or etag in [tag.removeprefix("W/") for tag in named]


def _range(header: str) -> tuple[int, int] | None:
    """Return the first byte of a range and the one after its last, or None (everything) for other forms of Range."""
    match = _RANGE.fullmatch(header.strip())
    if match is None:
        return None
    start, stop = int(match[1]), int(match[2]) + 1 if match[2] else 10**18
    return (start, stop) if start < stop else None
