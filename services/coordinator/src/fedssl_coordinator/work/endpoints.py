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
from fedssl_coordinator.anchors import service as anchors
from fedssl_coordinator.auth import Caller, WaitingWorker, WorkerId, require_still
from fedssl_coordinator.db import DB, transaction
from fedssl_coordinator.nudges import WORK_CHANNEL
from fedssl_coordinator.settings import settings
from fedssl_coordinator.waiting import Place
from fedssl_coordinator.work import service

router = APIRouter(prefix="/v1/work", tags=["work"])

POLL_SECONDS = 2.0  # while a claim waits it looks this often even if no wake-up comes, for Redis may be down


@router.post("/register")
def register(request: Register, client_id: WorkerId, session: DB) -> Registered:
    """A worker's introduction, at its start."""
    registered = service.register(session, client_id, request)
    return registered.model_copy(update={"receipt": anchors.note(session, client_id, request.anchor)})


@router.post("/heartbeat")
def heartbeat(request: Heartbeat, client_id: WorkerId, session: DB) -> HeartbeatReply:
    """Renew a lease and report progress."""
    reply = service.heartbeat(session, client_id, request)
    return reply.model_copy(update={"receipt": anchors.note(session, client_id, request.anchor)})


def _claim(caller: Caller) -> WorkItem | None:
    assert caller.client_id is not None, "a worker's token has a client"
    with transaction() as session:
        require_still(session, caller)
        return service.claim(session, caller.client_id)


@router.post("/claim", responses={204: {"description": "Nothing to do at the moment: ask again."}})
async def claim(claim: Claim, request: Request, caller: WaitingWorker, place: Place) -> WorkItem | None:
    """Lease an assignment, waiting for one to appear. Holds no database connection while it waits."""
    end = time.monotonic() + min(claim.wait_seconds, settings().claim_wait_seconds)
    with request.app.state.wakeups.listen(WORK_CHANNEL) as woken:
        while True:
            item = await run_in_threadpool(_claim, caller)
            left = end - time.monotonic()
            if item is not None or left <= 0 or await request.is_disconnected():
                # 204 where there is nothing: FastAPI would send `null`.
                return item if item is not None else Response(status_code=204)  # type: ignore[return-value]
            await woken.wait(min(left, POLL_SECONDS))


@router.post("/submit")
def submit(request: Submit, client_id: WorkerId, session: DB) -> Submitted:
    """Hand in an uploaded update."""
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
