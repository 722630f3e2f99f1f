"""`/v1/uploads`: the protocol tus 1.0, with its extensions creation, expiration and termination."""

import base64
import binascii
import dataclasses
from collections.abc import Mapping
from email.utils import format_datetime
from typing import Annotated
from uuid import UUID

from fastapi import APIRouter, Depends, Header, Request, Response, status
from fastapi.exceptions import RequestValidationError
from pydantic import TypeAdapter, ValidationError
from starlette.concurrency import run_in_threadpool

from fedssl.protocol.base import Digest
from fedssl.protocol.views import UploadPart, UploadParts
from fedssl_coordinator.core.db import transaction
from fedssl_coordinator.core.models import PartialUpload
from fedssl_coordinator.core.openapi import problems
from fedssl_coordinator.core.problems import ProblemError
from fedssl_coordinator.identity.authentication import Caller, WaitingOperatorOrWorker
from fedssl_coordinator.storage.artifacts import service as artifacts
from fedssl_coordinator.storage.artifacts.service import UploadPermit
from fedssl_coordinator.storage.uploads import service
from fedssl_coordinator.storage.uploads.service import AnnouncedUpload
from fedssl_coordinator.storage.uploads.streaming import receive_part, settle


def _sent_once(request: Request) -> None:
    """Raise RequestValidationError if a header of the protocol was sent twice: two values contradict each other."""
    for name in ("Upload-Length", "Upload-Offset", "Upload-Metadata", "Tus-Resumable"):
        if len(request.headers.getlist(name)) > 1:
            raise _mistake("was sent twice: send it once", name)


router = APIRouter(prefix="/v1/uploads", tags=["uploads"], dependencies=[Depends(_sent_once)])

_VERSION = "1.0.0"
_PART = "application/offset+octet-stream"
_LARGEST = 2**62
_METADATA_CHARACTERS = 1024
_BODY = {"requestBody": {"required": True, "content": {_PART: {}}}}
_digest: TypeAdapter[str] = TypeAdapter(Digest)
_assignment: TypeAdapter[UUID] = TypeAdapter(UUID)

Tus = Annotated[str | None, Header(alias="Tus-Resumable", description=f"The protocol's version, {_VERSION}.")]
Length = Annotated[int, Header(alias="Upload-Length", ge=1, le=_LARGEST, description="The file's size in bytes.")]
Offset = Annotated[int, Header(alias="Upload-Offset", ge=0, le=_LARGEST, description="The body's offset in the file.")]
Metadata = Annotated[
    str,
    Header(
        alias="Upload-Metadata",
        max_length=_METADATA_CHARACTERS,
        description="`digest` and, for a worker's update, `assignment`: names and base64 values, separated by commas.",
    ),
]


@router.post(
    "",
    status_code=status.HTTP_201_CREATED,
    response_class=Response,
    responses=problems(404, 409, 410, 412, 413, 423),
)
async def begin_upload(
    caller: WaitingOperatorOrWorker, upload_length: Length, upload_metadata: Metadata, tus_resumable: Tus = None
) -> Response:
    """Announce a file. The response contains where to send it, and from which byte on.

    Announcing the same file again returns the same upload, so a sender that has lost its state can find it again. If
    the whole file has arrived, `Upload-Offset` is its length. `Upload-Direct: 1` in the response offers
    `POST /v1/uploads/{upload_id}/parts` as an alternative.
    """
    _require_version(tus_resumable)
    announced = _announced(caller, upload_length, upload_metadata)
    upload, permit = await run_in_threadpool(_begin, caller, announced)
    offset = await settle(upload, permit, await run_in_threadpool(service.offset_of, upload))
    headers = {"Location": f"{router.prefix}/{upload.id}", "Upload-Offset": str(offset)}
    if service.is_direct():
        headers["Upload-Direct"] = "1"
    return await _answer(upload, status.HTTP_201_CREATED, headers)


@router.head("/{upload_id}", response_class=Response, responses=problems(409, 410, 412, 423))
async def show_upload(upload_id: UUID, caller: WaitingOperatorOrWorker, tus_resumable: Tus = None) -> Response:
    """Return the byte from which an upload continues, in `Upload-Offset`."""
    _require_version(tus_resumable)
    upload, permit = await run_in_threadpool(_resume, caller, upload_id)
    offset = await settle(upload, permit, await run_in_threadpool(service.offset_of, upload))
    headers = {"Upload-Offset": str(offset), "Upload-Length": str(upload.num_bytes), "Cache-Control": "no-store"}
    return await _answer(upload, status.HTTP_200_OK, headers)


@router.patch(
    "/{upload_id}",
    status_code=status.HTTP_204_NO_CONTENT,
    response_class=Response,
    openapi_extra=_BODY,
    responses=problems(409, 410, 412, 415, 423),
)
async def continue_upload(
    upload_id: UUID,
    request: Request,
    caller: WaitingOperatorOrWorker,
    upload_offset: Offset,
    tus_resumable: Tus = None,
) -> Response:
    """Send any number of bytes from `Upload-Offset` on. Once the last byte has arrived, the whole file is checked.

    The header is checked before any byte is stored, so the first request must contain the whole header.
    """
    _require_version(tus_resumable)
    if request.headers.get("content-type") != _PART:
        raise ProblemError("media-type", f"send the bytes as Content-Type: {_PART}")
    upload, permit = await run_in_threadpool(_resume, caller, upload_id)
    offset = await receive_part(upload, permit, upload_offset, request.stream())
    return await _answer(upload, status.HTTP_204_NO_CONTENT, {"Upload-Offset": str(offset)})


@router.post("/{upload_id}/parts", responses=problems(409, 410, 423))
async def ask_for_parts(upload_id: UUID, caller: WaitingOperatorOrWorker) -> UploadParts:
    """Return addresses at which the object store accepts some of the missing parts of an upload directly.

    Each is for a PUT of exactly these bytes, without a token. Repeat the request once they are sent, until no part is
    missing: that last response comes once the whole file has been checked and stored.
    """
    upload, permit = await run_in_threadpool(_resume, caller, upload_id)
    missing = await run_in_threadpool(service.missing_parts, upload)
    if not missing:
        await settle(upload, permit, await run_in_threadpool(service.offset_when_whole, upload))
    return UploadParts(parts=tuple(UploadPart(**dataclasses.asdict(part)) for part in missing))


@router.delete("/{upload_id}", status_code=status.HTTP_204_NO_CONTENT, response_class=Response, responses=problems(412))
async def end_upload(upload_id: UUID, caller: WaitingOperatorOrWorker, tus_resumable: Tus = None) -> Response:
    """Delete an upload and the bytes that have arrived. If it has already become an artifact, that stays."""
    _require_version(tus_resumable)
    await run_in_threadpool(_delete, caller, upload_id)
    return Response(status_code=status.HTTP_204_NO_CONTENT, headers={"Tus-Resumable": _VERSION})


def _begin(caller: Caller, announced: AnnouncedUpload) -> tuple[PartialUpload, UploadPermit]:
    with transaction() as session:
        _, upload_status = artifacts.permit_for(session, caller, announced.assignment_id, announced.digest)
    is_lost = artifacts.is_lost(upload_status, announced.digest)
    with transaction() as session:
        return service.begin(session, caller, announced, is_lost=is_lost)


def _resume(caller: Caller, upload_id: UUID) -> tuple[PartialUpload, UploadPermit]:
    with transaction() as session:
        return service.resume(session, caller, upload_id)


def _delete(caller: Caller, upload_id: UUID) -> None:
    with transaction() as session:
        service.delete(session, service.require_own(session, caller, upload_id).id)


async def _answer(upload: PartialUpload, status_code: int, headers: Mapping[str, str]) -> Response:
    expires = format_datetime(await run_in_threadpool(service.expiry_of, upload), usegmt=True)
    return Response(status_code=status_code, headers={**headers, "Tus-Resumable": _VERSION, "Upload-Expires": expires})


def _require_version(given: str | None) -> None:
    if given != _VERSION:
        detail = f"uploads follow tus {_VERSION}: send Tus-Resumable: {_VERSION}"
        raise ProblemError("protocol-version", detail, headers={"Tus-Version": _VERSION})


def _announced(caller: Caller, num_bytes: int, metadata: str) -> AnnouncedUpload:
    values = _decoded(metadata)
    try:
        digest = _digest.validate_python(values.get("digest"))
        given = values.get("assignment")
        assignment = None if given is None and caller.client_id is None else _assignment.validate_python(given)
    except ValidationError:
        raise _mistake("must name the digest (sha256 in hexadecimal) and, for an update, the assignment") from None
    return AnnouncedUpload(digest, num_bytes, assignment)


def _decoded(metadata: str) -> dict[str, str]:
    """Return the names and values of `Upload-Metadata`: pairs of a name and a value in base64, separated by commas."""
    try:
        pairs = [pair.split() for pair in metadata.split(",")]
        values = {name: base64.b64decode(value, validate=True).decode() for name, value in pairs}
    except (ValueError, binascii.Error, UnicodeDecodeError):
        raise _mistake("must be pairs of a name and a value in base64, separated by commas") from None
    if len(values) < len(pairs):
        raise _mistake("names a value twice: name each once")
    return values


def _mistake(message: str, header: str = "Upload-Metadata") -> RequestValidationError:
    place = ("header", header)
    return RequestValidationError([{"type": "value_error", "loc": place, "msg": message, "input": None}])
