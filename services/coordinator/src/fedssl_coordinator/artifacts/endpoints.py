"""`/v1/artifacts`"""

from typing import Annotated
from uuid import UUID

from fastapi import APIRouter, Header, Query, Request, Response, status
from starlette.concurrency import run_in_threadpool
from starlette.responses import JSONResponse

from fedssl.protocol.base import Digest
from fedssl_coordinator.artifacts import repository, service
from fedssl_coordinator.artifacts.service import Permit, store
from fedssl_coordinator.artifacts.streaming import artifact_response, receive
from fedssl_coordinator.auth import Caller, WaitingCaller, WaitingWorkerId
from fedssl_coordinator.db import transaction

router = APIRouter(prefix="/v1/artifacts", tags=["artifacts"])

AssignmentId = Annotated[UUID, Query(description="The assignment whose update this is.")]
ContentLength = Annotated[int | None, Header(ge=0, description="The size of the file in bytes.")]
_BODY = {"requestBody": {"required": True, "content": {"application/octet-stream": {}}}}


def _permit(assignment: UUID, client_id: str, digest: str) -> tuple[Permit, bool]:
    with transaction() as session:
        permit = service.permit_upload(session, assignment, client_id, digest)
        return permit, repository.is_uploaded(session, assignment, digest) and digest in store()


def _note(permit: Permit, digest: str, size: int) -> None:
    with transaction() as session:
        repository.add(session, digest, size)
        repository.add_upload(session, permit.assignment_id, digest)


def _check(digest: str, caller: Caller) -> None:
    with transaction() as session:
        service.may_fetch(session, digest, caller)


@router.put("/{digest}", status_code=status.HTTP_201_CREATED, openapi_extra=_BODY)
async def upload_artifact(
    digest: Digest,
    assignment: AssignmentId,
    request: Request,
    client_id: WaitingWorkerId,
    content_length: ContentLength = None,
) -> JSONResponse:
    """Send an update's safetensors file. Its header is checked before its body is read, its digest after."""
    permit, is_there = await run_in_threadpool(_permit, assignment, client_id, digest)
    if is_there:
        return JSONResponse({"digest": digest}, status_code=status.HTTP_200_OK)
    size = await receive(permit, digest, content_length, request.stream())
    await run_in_threadpool(_note, permit, digest, size)
    return JSONResponse({"digest": digest}, status_code=status.HTTP_201_CREATED)


@router.get("/{digest}", response_class=Response)
async def download_artifact(digest: Digest, request: Request, caller: WaitingCaller) -> Response:
    """An artifact's bytes; `Range` resumes a broken download."""
    await run_in_threadpool(_check, digest, caller)
    return artifact_response(digest, request.headers)
