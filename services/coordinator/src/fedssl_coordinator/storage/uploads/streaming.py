"""The bytes of one request, some mebibytes at a time, to the end of what has arrived before."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect

from fedssl.errors import ArtifactError, ArtifactTooLarge, OffsetMismatch
from fedssl_coordinator.core.db import transaction
from fedssl_coordinator.core.models import PartialUpload
from fedssl_coordinator.core.problems import ProblemError
from fedssl_coordinator.storage.artifacts.service import Permit
from fedssl_coordinator.storage.artifacts.streaming import checked_header, refusals
from fedssl_coordinator.storage.uploads import service


async def receive_part(upload: PartialUpload, permit: Permit, offset: int, body: AsyncIterator[bytes]) -> int:
    """Take what goes on at `offset`, and return where the next request goes on.

    The header is checked before any of it is kept, so the first request holds all of it. What has arrived when a
    connection breaks stays. Raises ProblemError.
    """
    with refusals(permit):
        async with _dropped_when_wrong(upload):
            return await _continued(upload, permit, offset, body)


async def settle(upload: PartialUpload, permit: Permit, offset: int) -> int:
    """Where the upload goes on; one of which all bytes are there is finished first. Raises ProblemError."""
    if offset == upload.num_bytes and not upload.is_complete:
        with refusals(permit):
            async with _dropped_when_wrong(upload):
                await run_in_threadpool(service.finish, upload, permit)
    return offset


async def _continued(upload: PartialUpload, permit: Permit, offset: int, body: AsyncIterator[bytes]) -> int:
    if offset != (size := await run_in_threadpool(service.offset_of, upload)):
        raise OffsetMismatch(f"{size} bytes are there: go on at byte {size}, not at {offset}")
    return await _receive(upload, permit, offset, body)


async def _receive(upload: PartialUpload, permit: Permit, offset: int, body: AsyncIterator[bytes]) -> int:
    partial = service.partial_of(upload)
    part_bytes = partial.part_bytes(upload.num_bytes)
    pending = bytearray()
    is_checked = offset > 0

    async def keep() -> None:
        nonlocal offset
        await run_in_threadpool(partial.append, bytes(pending), offset)
        offset += len(pending)
        pending.clear()

    try:
        async for chunk in body:
            pending += chunk
            if offset + len(pending) > upload.num_bytes:
                raise ArtifactTooLarge("more bytes came than Upload-Length announced")
            is_checked = is_checked or checked_header(pending, permit, upload.num_bytes) is not None
            if is_checked and len(pending) >= part_bytes:
                await keep()
    except (ClientDisconnect, ProblemError):  # it broke, or stands still
        if is_checked and pending:
            await keep()
        raise
    if not is_checked:
        raise ArtifactError("the first part ended within the safetensors header: send more in one request")
    if pending:
        await keep()
    return offset


@asynccontextmanager
async def _dropped_when_wrong(upload: PartialUpload) -> AsyncIterator[None]:
    """Bytes that are not what was announced are of no more use: the next attempt begins anew."""
    try:
        yield
    except OffsetMismatch:
        raise
    except ArtifactError:
        await run_in_threadpool(_forget, upload)
        raise


def _forget(upload: PartialUpload) -> None:
    with transaction() as session:
        service.forget(session, upload.id)
