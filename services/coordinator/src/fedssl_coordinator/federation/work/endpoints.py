"""`/v1/work`: only for workers."""

import functools
import time
from typing import Annotated, NamedTuple

from fastapi import APIRouter, Header, Request, Response
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError

from fedssl.protocol.site_work import EVALUATIONS_HEADER
from fedssl.protocol.work import (
    BROADCAST_HEADER,
    DELIVERY_BYTES,
    DELIVERY_CHARACTERS,
    DELIVERY_HEADER,
    OFFER_HEADER,
    PAUSE_HEADER,
    RESOURCES_HEADER,
    Claim,
    Decline,
    EndedQuery,
    EndedRuns,
    Heartbeat,
    HeartbeatReply,
    Register,
    Registered,
    Submit,
    Submitted,
    WorkItem,
)
from fedssl_coordinator.core.db import DB, transaction
from fedssl_coordinator.core.metrics import UPLOAD_BYTES
from fedssl_coordinator.core.openapi import problems
from fedssl_coordinator.core.run_documents import NewerSpecError
from fedssl_coordinator.core.settings import settings
from fedssl_coordinator.core.threads import run_transaction
from fedssl_coordinator.federation.ledger_anchors import service as anchors
from fedssl_coordinator.federation.site_evaluations import repository as site_evaluations
from fedssl_coordinator.federation.work import ordinary, pauses, repository, service
from fedssl_coordinator.identity.authentication import Caller, PresentedToken, PresentedWorker, WorkerId, client_of
from fedssl_coordinator.identity.concurrency_limit import place_of
from fedssl_coordinator.storage.artifacts.endpoints import ARTIFACT_BODY, ContentLength
from fedssl_coordinator.storage.artifacts.service import UpdatePermit, UploadStatus, has_arrived, permit_upload
from fedssl_coordinator.storage.artifacts.streaming import receive

router = APIRouter(prefix="/v1/work", tags=["work"])

Submission = Annotated[
    str,
    Header(alias=DELIVERY_HEADER, max_length=DELIVERY_CHARACTERS, description="The body of `submit`, as JSON."),
]

ObeysRetryAfter = Annotated[
    bool,
    Header(
        alias=PAUSE_HEADER,
        description="The worker waits for the seconds of a `Retry-After` before its next claim. Without this header no "
        "answer has one, and the claim waits for work.",
    ),
]

WantsBroadcast = Annotated[
    bool,
    Header(
        alias=BROADCAST_HEADER,
        description="The receipt is to confirm the round's broadcast too. Without this header it does not.",
    ),
]

_GONE_SECONDS = 5.0  # seconds between two checks that the worker of a waiting claim is still connected


@router.post("/register")
def register(request: Register, client_id: WorkerId, session: DB) -> Registered:
    """Register a worker when it starts."""
    registered = service.register(session, client_id, request)
    return registered.model_copy(update={"receipt": anchors.record_anchor(session, client_id, request.anchor)})


# Most requests are claims, heartbeats and submissions. A session as a parameter takes five turns in the thread pool,
# and each turn waits in a queue. These requests take one turn, so fewer leases run out while their heartbeat waits.


@router.post("/heartbeat", responses=problems(404))
async def heartbeat(request: Heartbeat, token: PresentedWorker) -> HeartbeatReply:
    """Renew a lease and report progress."""
    return await run_transaction(_heartbeat, token, request)


def _heartbeat(token: PresentedToken, request: Heartbeat) -> HeartbeatReply:
    if (worker := ordinary.heartbeat(token.secret_hash, request)) is not None:
        token.remember(worker)
        return HeartbeatReply()
    with transaction() as session:
        client_id = client_of(token.working(session))
        reply = service.heartbeat(session, client_id, request)
        return reply.model_copy(update={"receipt": anchors.record_anchor(session, client_id, request.anchor)})


class _Claimed(NamedTuple):
    """The result of a claim. Without an assignment: `evaluates` means that there is an evaluation for this site;
    otherwise the worker claims again after `pause` seconds, or waits if that is 0."""

    caller: Caller
    item: WorkItem | None
    evaluates: bool = False
    pause: int = 0


def _claim(token: PresentedToken, *, checks_evaluations: bool = False, may_pause: bool = False) -> _Claimed:
    """Claim for the worker.

    A run that this version does not understand is paused, because it would keep its clients from all other runs.
    """
    while True:
        try:
            return _claim_once(token, checks_evaluations=checks_evaluations, may_pause=may_pause)
        except NewerSpecError as error:
            with transaction() as session:
                service.pause_run(session, error.run_id, error.detail)


def _claim_once(token: PresentedToken, *, checks_evaluations: bool, may_pause: bool) -> _Claimed:
    ordinary_claim = ordinary.claim(token.secret_hash)
    if ordinary_claim is not None:
        worker, item = ordinary_claim
        caller = token.remember(worker)
        if item is not None or not (checks_evaluations or may_pause):
            return _Claimed(caller, item)
    with transaction() as session:
        if ordinary_claim is None:
            caller = token.working(session)
            if (item := service.claim(session, client_of(caller))) is not None:
                return _Claimed(caller, item)
        client_id = client_of(caller)
        pause = pauses.pause_seconds(session, client_id) if may_pause else 0
        evaluates = checks_evaluations and bool(site_evaluations.offered_to(session, [client_id]))
        return _Claimed(caller, None, evaluates, 0 if evaluates else pause)


@router.post("/claim", responses={204: {"description": "There is no work now: claim again."}})
async def claim(
    claim: Claim,
    request: Request,
    response: Response,
    token: PresentedWorker,
    *,
    obeys_retry_after: ObeysRetryAfter = False,
) -> WorkItem | None:
    """Lease an assignment, or wait for one. Holds no database connection while it waits.

    The header `Fedssl-Deliver-Bytes` is the size up to which `/v1/work/deliver` takes the update. With the header
    `Fedssl-Resources`, heartbeats may contain `resources`. A claim with `site_evaluations` ends, with the
    header `Fedssl-Site-Evaluations: 1`, if there is no assignment and an evaluation for this site. With the header
    `Fedssl-Obeys-Retry-After: 1`, a claim during a round for which its client was not drawn does not wait:
    `Retry-After` has the seconds until the next round is expected, at most 60.
    """
    response.headers.update({OFFER_HEADER: str(DELIVERY_BYTES), RESOURCES_HEADER: "1", EVALUATIONS_HEADER: "0"})
    end = time.monotonic() + min(claim.wait_seconds, settings().claim_wait_seconds)
    waiting_claims = request.app.state.waiting_claims
    num_wakeups = waiting_claims.num_wakeups
    attempt = functools.partial(_claim, checks_evaluations=claim.site_evaluations)
    found = await run_transaction(functools.partial(attempt, may_pause=obeys_retry_after), token)
    if found.item is not None:
        return found.item
    if found.pause or found.evaluates:
        return _no_work(found)  # type: ignore[return-value]
    waiting = waiting_claims.wait(found.caller, site_evaluations=claim.site_evaluations)
    with place_of(found.caller.token_id), waiting as woken:
        # Work that was offered before this claim was waiting has not woken it.
        is_woken = waiting_claims.num_wakeups != num_wakeups
        while True:
            while not is_woken:
                left = end - time.monotonic()
                if left <= 0 or await request.is_disconnected():
                    return _no_work(found)  # type: ignore[return-value]
                is_woken = await woken.wait(min(left, _GONE_SECONDS))
            found = await run_transaction(attempt, token)
            if found.item is not None:
                return found.item
            if found.evaluates:
                return _no_work(found)  # type: ignore[return-value]
            is_woken = False


def _no_work(found: _Claimed) -> Response:
    """Return the answer to a claim without an assignment: FastAPI would send `null`."""
    headers = {EVALUATIONS_HEADER: str(int(found.evaluates))}
    if found.pause:
        headers["Retry-After"] = str(found.pause)
    return Response(status_code=204, headers=headers)


@router.post("/submit", responses=problems(404, 409, 410))
async def submit(request: Submit, token: PresentedWorker, *, wants_broadcast: WantsBroadcast = False) -> Submitted:
    """Submit an uploaded update."""
    return await run_transaction(functools.partial(_submit, token, request, None, wants_broadcast=wants_broadcast))


def _submit(token: PresentedToken, request: Submit, num_bytes: int | None, *, wants_broadcast: bool) -> Submitted:
    with transaction() as session:
        accepted = None if num_bytes is None else ordinary.accept(session, token.secret_hash, request, num_bytes)
        sent = extension = None
        if accepted is not None:
            worker, sent, extension, submitted = accepted
            client_id = client_of(token.remember(worker))
        else:
            client_id = client_of(token.caller(session))
            submitted = service.submit(session, client_id, request, num_bytes)
            if wants_broadcast and request.anchor is not None:
                sent = repository.sent_broadcast(session, request.assignment_id)
        receipt = anchors.record_anchor(
            session, client_id, request.anchor, sent if wants_broadcast else None, extension
        )
        return submitted.model_copy(update={"receipt": receipt})


@router.post("/deliver", openapi_extra=ARTIFACT_BODY, responses=problems(404, 409, 410, 411))
async def deliver(
    request: Request,
    token: PresentedWorker,
    submission: Submission,
    content_length: ContentLength = None,
    *,
    wants_broadcast: WantsBroadcast = False,
) -> Submitted:
    """Send an update of at most 4 MiB and submit it, in one request.

    It does the same as `PUT /v1/artifacts/{digest}` followed by `submit`, with the same answers and refusals. The same
    delivery again gets the same answer. If the coordinator has the update already, it does not read the body.
    """
    submit = _parsed(submission, request.headers.getlist(DELIVERY_HEADER))
    permit = await run_transaction(_permit, token, submit)
    num_bytes = None
    if permit is not None:
        if content_length is not None and content_length > DELIVERY_BYTES:
            detail = (
                f"{content_length} bytes announced; one request delivers at most {DELIVERY_BYTES}: send it with PUT"
            )
            raise permit.refusal("artifact-too-large", detail)
        num_bytes = await receive(permit, submit.update, content_length, request.stream())
        UPLOAD_BYTES.inc(num_bytes)
    return await run_transaction(functools.partial(_submit, token, submit, num_bytes, wants_broadcast=wants_broadcast))


def _parsed(submission: str, lines: list[str]) -> Submit:
    """Return the submission of a header. Raises RequestValidationError."""
    place = ("header", DELIVERY_HEADER)
    if len(lines) > 1:
        problem = {"type": "value_error", "loc": place, "msg": "send this header once", "input": None}
        raise RequestValidationError([problem])
    try:
        return Submit.model_validate_json(submission)
    except ValidationError as error:
        problems = error.errors(include_url=False, include_context=False, include_input=False)
        raise RequestValidationError([{**each, "loc": (*place, *each["loc"])} for each in problems]) from None


def _permit(token: PresentedToken, submit: Submit) -> UpdatePermit | None:
    """Return what the worker may send, or None if it has sent this update before."""
    if (ordinary_permit := ordinary.permit(token.secret_hash, submit)) is not None:
        worker, permit = ordinary_permit
        token.remember(worker)
        return permit
    with transaction() as session:
        client_id = client_of(token.caller(session))
        permit, status = permit_upload(session, submit.assignment_id, client_id, submit.update)
        if status is UploadStatus.MISSING:
            service.check_before_delivery(session, permit, submit)
    return None if has_arrived(status, submit.update) else permit


@router.post("/ended-runs")
def ended_runs(request: EndedQuery, client_id: WorkerId, session: DB) -> EndedRuns:
    """List which of the worker's runs have ended, so that it can delete the client states that it keeps for them."""
    return service.ended_runs(session, client_id, request)


@router.post("/decline", responses=problems(404, 409, 410))
def decline(request: Decline, client_id: WorkerId, session: DB) -> Submitted:
    """Return an assignment, with the reason."""
    return service.decline(session, client_id, request)
