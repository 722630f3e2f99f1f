"""`/v1/artifacts`"""

import functools
from typing import Annotated, Any
from uuid import UUID

from fastapi import APIRouter, Header, Query, Request, Response, status
from fastapi.exceptions import RequestValidationError
from starlette.responses import JSONResponse

from fedssl.protocol.base import Digest
from fedssl_coordinator.core.db import transaction
from fedssl_coordinator.core.metrics import UPLOAD_BYTES
from fedssl_coordinator.core.openapi import problems
from fedssl_coordinator.core.threads import run_in_thread, run_transaction
from fedssl_coordinator.identity.authentication import Caller, PresentedOperatorOrWorker, PresentedToken
from fedssl_coordinator.storage.artifacts import service
from fedssl_coordinator.storage.artifacts.service import UploadPermit
from fedssl_coordinator.storage.artifacts.streaming import DOWNLOAD, DOWNLOAD_HEAD, artifact_response, receive

router = APIRouter(prefix="/v1/artifacts", tags=["artifacts"])

AssignmentId = Annotated[
    UUID | None, Query(description="The assignment whose update this is. Operators, who send data sets, leave it out.")
]
ContentLength = Annotated[int | None, Header(ge=0, description="The size of the file in bytes.")]
_STORED: dict[int | str, dict[str, Any]] = {status.HTTP_200_OK: {"description": "This artifact was already stored."}}
ARTIFACT_BODY = {"requestBody": {"required": True, "content": {"application/octet-stream": {}}}}


def _permit(token: PresentedToken, assignment: UUID | None, digest: str) -> tuple[Caller, UploadPermit, bool]:
    """Return the caller, what it may send, and whether that has arrived before."""
    with transaction() as session:
        caller = token.caller(session)
        if caller.client_id is not None and assignment is None:
            missing = {"type": "missing", "loc": ("query", "assignment"), "msg": "Field required", "input": None}
            raise RequestValidationError([missing])
        permit, upload_status = service.permit_for(session, caller, assignment, digest)
    return caller, permit, service.has_arrived(upload_status, digest)


def _record(caller: Caller, assignment: UUID | None, digest: str, size: int) -> None:
    with transaction() as session:
        service.record_upload(session, caller.token_id, assignment, digest, size)


def _check(digest: str, token: PresentedToken) -> None:
    if (worker := service.worker_that_may_fetch(digest, token.secret_hash)) is not None:
        token.remember(worker)
        return
    with transaction() as session:
        service.may_fetch(session, digest, token.caller(session))


@router.put(
    "/{digest}",
    status_code=status.HTTP_201_CREATED,
    openapi_extra=ARTIFACT_BODY,
    responses=_STORED | problems(409, 410, 411),
)
async def upload_artifact(
    digest: Digest,
    request: Request,
    token: PresentedOperatorOrWorker,
    assignment: AssignmentId = None,
    content_length: ContentLength = None,
) -> JSONResponse:
    """Send a safetensors file: a worker sends its update, an operator the images of a data set to register.

    The header is checked before the body is read, the digest afterwards. The file is sent in one request: if the
    connection breaks, send it again from the first byte. For large files use `/v1/uploads`, which can be resumed.
    """
    caller, permit, is_there = await run_transaction(_permit, token, assignment, digest)
    if is_there:
        return JSONResponse({"digest": digest}, status_code=status.HTTP_200_OK)
    size = await receive(permit, digest, content_length, request.stream())
    UPLOAD_BYTES.inc(size)
    await run_transaction(_record, caller, assignment, digest, size)
    return JSONResponse({"digest": digest}, status_code=status.HTTP_201_CREATED)


@router.head("/{digest}", response_class=Response, responses=DOWNLOAD_HEAD)
@router.get("/{digest}", response_class=Response, responses=DOWNLOAD)
async def download_artifact(digest: Digest, request: Request, token: PresentedOperatorOrWorker) -> Response:
    """Fetch an artifact's bytes; `Range` resumes an interrupted download. `ETag` is their SHA-256.

    With `Accept-Direct: 1` the response may be a 307 redirect to a signed address of the object store, which needs no
    token.
    """
    await run_transaction(_check, digest, token)
    respond = functools.partial(artifact_response, method=request.method, direct=True)
    return await run_in_thread(respond, digest, request.headers)
