"""Appends the bytes of a request to an upload, a few mebibytes at a time, and finishes uploads that are whole."""

from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from typing import Self

from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect

from fedssl.artifacts.hashed import HashedFile
from fedssl.artifacts.partial import Partial
from fedssl.errors import ArtifactError, ArtifactTooLarge, OffsetMismatch
from fedssl_coordinator.core.db import transaction
from fedssl_coordinator.core.metrics import UPLOAD_BYTES
from fedssl_coordinator.core.models import PartialUpload
from fedssl_coordinator.core.problems import ProblemError
from fedssl_coordinator.storage.artifacts.service import UploadPermit
from fedssl_coordinator.storage.artifacts.streaming import (
    SYNC_BYTES,
    Parts,
    add_chunk,
    behind,
    checked_header,
    refusals,
)
from fedssl_coordinator.storage.uploads import service


async def receive_part(upload: PartialUpload, permit: UploadPermit, offset: int, body: AsyncIterator[bytes]) -> int:
    """Append a request's body at `offset`, and return the offset at which the next request continues.

    The header is checked before any byte is stored, so the first request must contain the whole header. If the
    connection breaks, the bytes that have arrived stay. An upload that is whole then is finished. Raises ProblemError.
    """
    begun = offset
    partial = service.partial_of(upload)
    with _Arriving(partial) as arriving:
        with refusals(permit):
            try:
                async with _deleted_when_wrong(upload):
                    offset = await _continued(upload, arriving, permit, offset, body)
            finally:
                if arriving.is_lost:
                    await run_in_threadpool(partial.discard)
        UPLOAD_BYTES.inc(offset - begun)
        return await settle(upload, permit, offset, arriving.hashed)


async def settle(upload: PartialUpload, permit: UploadPermit, offset: int, arrived: HashedFile | None = None) -> int:
    """Return the offset at which the upload continues, and finish it first if it is whole. Raises ProblemError.

    `arrived` is the upload's file if it was hashed while it arrived.
    """
    if offset == upload.num_bytes and not upload.is_complete:
        with refusals(permit):
            async with _deleted_when_wrong(upload):
                await run_in_threadpool(_finish, upload, permit, arrived)
    return offset


class _Arriving:
    """Appends a request's bytes to an upload, and hashes the file meanwhile if they are its first ones.

    Bytes that the file has cannot change, because every request only appends. So the digest that was computed here is
    right if the file is still the same one in the end, and has no further bytes. No other file can have had its place
    in between, because files are only removed from it. Only the first bytes are read again: they may differ in a file
    that another request put there before this one was opened.
    """

    def __init__(self, partial: Partial) -> None:
        self.hashed: HashedFile | None = None
        self.is_lost = False
        self._partial = partial
        self._files = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._files.close()

    def append(self, parts: Parts, offset: int) -> None:
        self._partial.append(parts, offset)
        if offset == 0 and (file := self._partial.open()) is not None:
            self.hashed = HashedFile(self._files.enter_context(file))
            self.hashed.seek(sum(map(len, parts)))
        elif self.hashed is not None:
            self.hashed.add(parts)

    def sync(self) -> None:
        """Sync what has arrived. If the disk fails, these bytes are lost."""
        try:
            self._partial.sync()
        except FileNotFoundError:
            pass  # another request has removed it: the next call of `append` reports that
        except OSError:
            self.is_lost = True
            raise


async def _continued(
    upload: PartialUpload, arriving: _Arriving, permit: UploadPermit, offset: int, body: AsyncIterator[bytes]
) -> int:
    if offset != (size := await run_in_threadpool(service.offset_of, upload)):
        raise OffsetMismatch(f"{size} bytes have arrived: continue at byte {size}, not at {offset}")
    return await _receive(upload, arriving, permit, offset, body)


async def _receive(
    upload: PartialUpload, arriving: _Arriving, permit: UploadPermit, offset: int, body: AsyncIterator[bytes]
) -> int:
    part_bytes = service.partial_of(upload).part_bytes(upload.num_bytes)
    beginning = bytearray()
    pending: Parts = [beginning]
    num_pending = 0
    is_checked = offset > 0
    synced = offset

    async with behind() as write, behind() as sync:

        async def keep() -> None:
            nonlocal offset, pending, num_pending, synced
            await write(arriving.append, pending, offset)
            offset += num_pending
            pending, num_pending = [], 0
            if offset - synced >= SYNC_BYTES:
                await sync(arriving.sync)
                synced = offset

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


def _finish(upload: PartialUpload, permit: UploadPermit, arrived: HashedFile | None) -> None:
    """Check a whole upload and make an artifact of it. Only one of several simultaneous requests does this.

    Raises ArtifactError if it is not what was announced, and ProblemError while another process checks it or this
    process checks as many uploads as it may.
    """
    partial = service.partial_of(upload)
    with partial.locked() as held:
        if not held or partial.size != upload.num_bytes:
            # Another request holds the file or has just finished it, or this process holds too many files.
            with transaction() as session:
                if service.is_complete(session, upload.id):
                    return
            raise service.busy("all bytes have arrived, and are being checked or will be soon: ask again shortly")
        try:
            with partial.whole() as whole:
                service.check_file(whole.path, upload.digest, permit, arrived)
                whole.keep(upload.digest)
        except FileNotFoundError:
            with transaction() as session:
                service.require_not_deleted(session, upload.id)
            raise
        with transaction() as session:
            service.complete(session, upload)
