"""Bytes in and out, a mebibyte at a time: neither direction ever holds an artifact in memory."""

import re
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import contextmanager

import structlog
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect
from starlette.responses import Response, StreamingResponse

from fedssl.artifacts.finite import check_finite
from fedssl.artifacts.header import LENGTH_BYTES, Header, header_length, parse_header
from fedssl.artifacts.store import Writer
from fedssl.errors import ArtifactError, ArtifactNotFound, ArtifactTooLarge, OffsetMismatch
from fedssl_coordinator.core.problems import ProblemError
from fedssl_coordinator.core.settings import settings
from fedssl_coordinator.core.store import store
from fedssl_coordinator.storage.artifacts.service import Permit, check_announced

CHUNK = 1 << 20
_LINK_SECONDS = 900
_RANGE = re.compile(r"bytes=(\d{1,17})-(\d{1,17})?", re.ASCII)

log = structlog.get_logger(__name__)


async def receive(permit: Permit, digest: str, content_length: int | None, body: AsyncIterator[bytes]) -> int:
    """Store an upload that fits the permit, and return its size in bytes.

    The header is checked before the body is read, the digest and the values after. Raises ProblemError, storing
    nothing.
    """
    if content_length is None:
        detail = "send Content-Length, the size of the safetensors file in bytes, and not in chunks"
        raise permit.refusal("length-required", detail)
    check_announced(permit, content_length)
    with refusals(permit), store().writer() as writer:
        header = await _receive_into(writer, permit, content_length, body)
        writer.verify(digest)  # first: bytes that broke on the way say nothing of the tensors
        await run_in_threadpool(check_finite, writer.path, header)
        await run_in_threadpool(writer.commit, digest)
    return content_length


@contextmanager
def refusals(permit: Permit) -> Iterator[None]:
    """What goes wrong with an upload, as the problem that its sender is told of."""
    try:
        yield
    except OffsetMismatch as error:
        raise ProblemError("offset-mismatch", str(error)) from None
    except ArtifactTooLarge as error:
        raise permit.refusal("artifact-too-large", str(error)) from None
    except ArtifactError as error:
        raise permit.refusal("artifact-rejected", str(error)) from None
    except ClientDisconnect:
        raise ProblemError("invalid-request", "the connection broke: send the artifact again") from None
    except OSError as error:
        log.error("store.failed", error=repr(error))
        detail = "the artifact store cannot take the upload at the moment: send it again shortly"
        raise ProblemError("unavailable", detail, headers={"Retry-After": "10"}) from None


async def _receive_into(writer: Writer, permit: Permit, content_length: int, body: AsyncIterator[bytes]) -> Header:
    pending = bytearray()
    header: Header | None = None
    received = 0
    async for chunk in body:
        received += len(chunk)
        if received > content_length:
            raise ArtifactTooLarge("more bytes came than Content-Length announced")
        pending += chunk
        header = header or checked_header(pending, permit, content_length)
        if header is not None and len(pending) >= CHUNK:
            await run_in_threadpool(writer.write, bytes(pending))
            pending.clear()
    if header is None:
        raise ArtifactError("the upload ended within its safetensors header")
    if received != content_length:
        raise ArtifactError(f"{received} bytes came, {content_length} were announced: send the artifact again")
    await run_in_threadpool(writer.write, bytes(pending))
    writer.flush()
    return header


def checked_header(beginning: bytearray, permit: Permit, num_bytes: int) -> Header | None:
    """The header of a file of so many bytes, checked against the permit, once enough of the beginning is there.

    Raises ArtifactError.
    """
    if len(beginning) < LENGTH_BYTES:
        return None
    end = LENGTH_BYTES + header_length(bytes(beginning[:LENGTH_BYTES]), permit.max_header_bytes)
    if len(beginning) < end:
        return None
    header = parse_header(bytes(beginning[LENGTH_BYTES:end]))
    permit.check(header)
    if header.total_bytes != num_bytes:
        raise ArtifactError(f"the header describes {header.total_bytes} bytes, {num_bytes} were announced")
    return header


def artifact_response(digest: str, request_headers: Mapping[str, str], *, direct: bool = False) -> Response:
    """An artifact's bytes, all of them or one range. Raises ProblemError where the store lacks it.

    `direct`: where the settings say so, and the caller that it can go there, the address of the object store.
    """
    try:
        size = store().size(digest)
    except ArtifactNotFound as error:
        raise ProblemError("not-found", str(error)) from None
    etag = f'"{digest}"'
    goes_there = direct and settings().store_direct and request_headers.get("accept-direct") == "1"
    if goes_there and (link := store().link(digest, _LINK_SECONDS)) is not None:
        return Response(status_code=307, headers={"Location": link, "ETag": etag, "Cache-Control": "no-store"})
    headers = {"ETag": etag, "Accept-Ranges": "bytes"}
    start, stop, status = 0, size, 200
    # A range of what the caller had begun to fetch, which a run's newest weights need no longer be.
    asked = _range(request_headers.get("range", "")) if request_headers.get("if-range", etag) == etag else None
    if asked is not None:
        start, stop, status = asked[0], min(asked[1], size), 206
        if start >= size:
            detail = f"the artifact has {size} bytes: ask for bytes below that"
            raise ProblemError("range-not-satisfiable", detail, headers={"Content-Range": f"bytes */{size}"})
        headers["Content-Range"] = f"bytes {start}-{stop - 1}/{size}"
    headers["Content-Length"] = str(stop - start)
    return StreamingResponse(
        store().read(digest, start, stop), status_code=status, headers=headers, media_type="application/octet-stream"
    )


def _range(header: str) -> tuple[int, int] | None:
    """First byte and the one after the last; None, for the whole, where it is not one range from a first byte on."""
    match = _RANGE.fullmatch(header.strip())
    if match is None:
        return None
    start, stop = int(match[1]), int(match[2]) + 1 if match[2] else 10**18
    return (start, stop) if start < stop else None
