"""`/v1/work`: for workers alone."""

import time

from fastapi import APIRouter, Request, Response
from starlette.concurrency import run_in_threadpool

from fedssl.protocol.work import (
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
from fedssl_coordinator.core.settings import settings
from fedssl_coordinator.federation.ledger_anchors import service as anchors
from fedssl_coordinator.federation.work import service
from fedssl_coordinator.identity.authentication import Caller, WaitingWorker, WorkerId, require_still
from fedssl_coordinator.identity.concurrency_limit import PlacedWorker

router = APIRouter(prefix="/v1/work", tags=["work"])

_GONE_SECONDS = 5.0  # how often a claim that waits looks whether its worker is still there


@router.post("/register")
def register(request: Register, client_id: WorkerId, session: DB) -> Registered:
    """A worker's introduction, at its start."""
    registered = service.register(session, client_id, request)
    return registered.model_copy(update={"receipt": anchors.note(session, client_id, request.anchor)})


# Claims, heartbeats and submissions are most of all requests. A session as a parameter costs five turns in a thread,
# each of them at the end of a queue; with one, fewer leases run out while their heartbeat waits.


@router.post("/heartbeat")
async def heartbeat(request: Heartbeat, caller: WaitingWorker) -> HeartbeatReply:
    """Renew a lease and report progress."""
    return await run_in_threadpool(_heartbeat, _client_of(caller), request)


def _heartbeat(client_id: str, request: Heartbeat) -> HeartbeatReply:
    with transaction() as session:
        reply = service.heartbeat(session, client_id, request)
        return reply.model_copy(update={"receipt": anchors.note(session, client_id, request.anchor)})


def _claim(caller: Caller) -> WorkItem | None:
    with transaction() as session:
        require_still(session, caller)
        return service.claim(session, _client_of(caller))


@router.post("/claim", responses={204: {"description": "Nothing to do at the moment: ask again."}})
async def claim(claim: Claim, request: Request, caller: PlacedWorker) -> WorkItem | None:
    """Lease an assignment, waiting for one to appear. Holds no database connection while it waits."""
    end = time.monotonic() + min(claim.wait_seconds, settings().claim_wait_seconds)
    with request.app.state.waiting_claims.wait(caller) as woken:
        while (item := await run_in_threadpool(_claim, caller)) is None:
            is_woken = False
            while not is_woken:
                left = end - time.monotonic()
                if left <= 0 or await request.is_disconnected():
                    # FastAPI would send `null`.
                    return Response(status_code=204)  # type: ignore[return-value]
                is_woken = await woken.wait(min(left, _GONE_SECONDS))
    return item


@router.post("/submit")
async def submit(request: Submit, caller: WaitingWorker) -> Submitted:
    """Hand in an uploaded update."""
    return await run_in_threadpool(_submit, _client_of(caller), request)


def _submit(client_id: str, request: Submit) -> Submitted:
    with transaction() as session:
        submitted = service.submit(session, client_id, request)
        return submitted.model_copy(update={"receipt": anchors.note(session, client_id, request.anchor)})


@router.post("/ended-runs")
def ended_runs(request: EndedQuery, client_id: WorkerId, session: DB) -> EndedRuns:
    """Which of the runs that the worker keeps a client state for need it no more. No run but its own is ever named."""
    return service.ended_runs(session, client_id, request)


@router.post("/decline")
def decline(request: Decline, client_id: WorkerId, session: DB) -> Submitted:
    """Give an assignment back, with the reason."""
    return service.decline(session, client_id, request)


def _client_of(caller: Caller) -> str:
    assert caller.client_id is not None, "a worker's token has a client"
    return caller.client_id
