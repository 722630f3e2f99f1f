"""Bytes in and out, a mebibyte at a time: neither direction ever holds an artifact in memory."""

import re
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect
from starlette.responses import Response, StreamingResponse

from fedssl.artifacts.finite import check_finite
from fedssl.artifacts.header import (
    LENGTH_BYTES,
    Header,
    check_header,
    header_length,
    max_file_bytes,
    max_header_bytes,
    parse_header,
)
from fedssl.artifacts.store import Writer
from fedssl.errors import ArtifactError, ArtifactNotFound, ArtifactTooLarge
from fedssl_coordinator.artifacts.service import Permit, store
from fedssl_coordinator.problems import ProblemError

CHUNK = 1 << 20
_RANGE = re.compile(r"bytes=(\d{1,18})-(\d{1,18})?")


async def receive(permit: Permit, digest: str, content_length: int | None, body: AsyncIterator[bytes]) -> int:
    """Store an upload that fits the permit's plan, and return its size in bytes.

    The header is checked before the body is read, the digest and the values after. Raises ProblemError, storing
    nothing.
    """
    if content_length is None:
        raise ProblemError("length-required", "send Content-Length: the size of the safetensors file in bytes")
    limit = max_file_bytes(permit.tensors)
    if content_length > limit:
        detail = f"{content_length} bytes announced; the method's artifact plan allows at most {limit}"
        raise permit.refusal("artifact-too-large", detail)
    try:
        with store().writer() as writer:
            header = await _receive_into(writer, permit, content_length, body)
            await run_in_threadpool(check_finite, writer.path, header)
            await run_in_threadpool(writer.commit, digest)
    except ArtifactTooLarge as error:
        raise permit.refusal("artifact-too-large", str(error)) from None
    except ArtifactError as error:
        raise permit.refusal("artifact-rejected", str(error)) from None
    except ClientDisconnect:
        raise ProblemError("invalid-request", "the connection broke: send the artifact again") from None
    return content_length


async def _receive_into(writer: Writer, permit: Permit, content_length: int, body: AsyncIterator[bytes]) -> Header:
    pending = bytearray()
    header: Header | None = None
    received = 0
    async for chunk in body:
        received += len(chunk)
        if received > content_length:
            raise ArtifactTooLarge("more bytes came than Content-Length announced")
        pending += chunk
        if header is None and (header := _header(pending, permit)) is not None:
            _check_size(header, content_length)
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


def _header(pending: bytearray, permit: Permit) -> Header | None:
    """The header, checked against the plan, once enough bytes are there."""
    if len(pending) < LENGTH_BYTES:
        return None
    end = LENGTH_BYTES + header_length(bytes(pending[:LENGTH_BYTES]), max_header_bytes(permit.tensors))
    if len(pending) < end:
        return None
    header = parse_header(bytes(pending[LENGTH_BYTES:end]))
    check_header(header, permit.tensors, "update")
    return header


def _check_size(header: Header, content_length: int) -> None:
    if header.total_bytes != content_length:
        raise ArtifactError(f"the header describes {header.total_bytes} bytes, {content_length} were announced")


def artifact_response(digest: str, range_header: str | None) -> Response:
    """An artifact's bytes, all of them or one range. Raises ProblemError where the store lacks it."""
    try:
        path = store().path(digest)
    except ArtifactNotFound as error:
        raise ProblemError("not-found", str(error)) from None
    size = path.stat().st_size
    headers = {"ETag": f'"{digest}"', "Accept-Ranges": "bytes", "Cache-Control": "private, immutable"}
    start, stop, status = 0, size, 200
    if range_header is not None and (match := _RANGE.fullmatch(range_header.strip())):
        start, stop, status = int(match[1]), min(int(match[2]) + 1 if match[2] else size, size), 206
        if start >= stop:
            detail = f"the artifact has {size} bytes"
            raise ProblemError("range-not-satisfiable", detail, headers={"Content-Range": f"bytes */{size}"})
        headers["Content-Range"] = f"bytes {start}-{stop - 1}/{size}"
    headers["Content-Length"] = str(stop - start)
    return StreamingResponse(
        _chunks(path, start, stop), status_code=status, headers=headers, media_type="application/octet-stream"
    )


def _chunks(path: Path, start: int, stop: int) -> Iterator[bytes]:
    with path.open("rb") as file:
        file.seek(start)
        while start < stop and (chunk := file.read(min(CHUNK, stop - start))):
            start += len(chunk)
            yield chunk
