"""Appends the bytes of a request to an upload, a few mebibytes at a time, and finishes uploads that are whole."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect

from fedssl.errors import ArtifactError, ArtifactTooLarge, OffsetMismatch
from fedssl_coordinator.core.db import transaction
from fedssl_coordinator.core.models import PartialUpload
from fedssl_coordinator.core.problems import ProblemError
from fedssl_coordinator.storage.artifacts.service import UploadPermit
from fedssl_coordinator.storage.artifacts.streaming import Parts, add_chunk, behind, checked_header, refusals
from fedssl_coordinator.storage.uploads import service


async def receive_part(upload: PartialUpload, permit: UploadPermit, offset: int, body: AsyncIterator[bytes]) -> int:
    """Append a request's body at `offset`, and return the offset at which the next request continues.

    The header is checked before any byte is stored, so the first request must contain the whole header. If the
    connection breaks, the bytes that have arrived stay. Raises ProblemError.
    """
    with refusals(permit):
        async with _deleted_when_wrong(upload):
            return await _continued(upload, permit, offset, body)


async def settle(upload: PartialUpload, permit: UploadPermit, offset: int) -> int:
    """Return the offset at which the upload continues, and finish it first if it is whole. Raises ProblemError."""
    if offset == upload.num_bytes and not upload.is_complete:
        with refusals(permit):
            async with _deleted_when_wrong(upload):
                await run_in_threadpool(_finish, upload, permit)
    return offset


async def _continued(upload: PartialUpload, permit: UploadPermit, offset: int, body: AsyncIterator[bytes]) -> int:
    if offset != (size := await run_in_threadpool(service.offset_of, upload)):
        raise OffsetMismatch(f"{size} bytes have arrived: continue at byte {size}, not at {offset}")
    return await _receive(upload, permit, offset, body)


async def _receive(upload: PartialUpload, permit: UploadPermit, offset: int, body: AsyncIterator[bytes]) -> int:
    partial = service.partial_of(upload)
    part_bytes = partial.part_bytes(upload.num_bytes)
    beginning = bytearray()
    pending: Parts = [beginning]
    num_pending = 0
    is_checked = offset > 0

    async with behind() as write:

        async def keep() -> None:
            nonlocal offset, pending, num_pending
            await write(partial.append, pending, offset)
            offset += num_pending
            pending, num_pending = [], 0

        try:
            async for chunk in body:
                num_pending += len(chunk)
                if offset + num_pending > upload.num_bytes:
                    raise ArtifactTooLarge("more bytes arrived than Upload-Length announced")
                if is_checked:
                    add_chunk(pending, chunk)
                else:
                    beginning += chunk
                    is_checked = checked_header(beginning, permit, upload.num_bytes) is not None
                if is_checked and num_pending >= part_bytes:
                    await keep()
        except (ClientDisconnect, ProblemError):  # the connection broke or stalled
            if is_checked and num_pending:
                await keep()
            raise
        if not is_checked:
            raise ArtifactError("the first part ended within the safetensors header: send more in one request")
        if num_pending:
            await keep()
    return offset


@asynccontextmanager
async def _deleted_when_wrong(upload: PartialUpload) -> AsyncIterator[None]:
    """Delete the upload if its bytes are not what was announced: the next attempt starts from scratch."""
    try:
        yield
    except OffsetMismatch:
        raise
    except ArtifactError:
        await run_in_threadpool(_delete, upload)
        raise


def _delete(upload: PartialUpload) -> None:
    with transaction() as session:
        service.delete(session, upload.id)


def _finish(upload: PartialUpload, permit: UploadPermit) -> None:
    """Check a whole upload and make an artifact of it. Only one of several simultaneous requests does this.

    Raises ArtifactError if it is not what was announced, and ProblemError while another process checks it or this
    process checks as many uploads as it may.
    """
    partial = service.partial_of(upload)
    with partial.locked() as held:
        if not held or partial.size != upload.num_bytes:
            # Another request holds the file or has just finished it, or this process holds too many.
            with transaction() as session:
                if service.is_complete(session, upload.id):
                    return
            raise service.busy("all bytes have arrived, and are being checked or will be soon: ask again shortly")
        with partial.whole() as whole:
            service.check_file(whole.path, upload.digest, permit)
            whole.keep(upload.digest)
        with transaction() as session:
            service.complete(session, upload)
