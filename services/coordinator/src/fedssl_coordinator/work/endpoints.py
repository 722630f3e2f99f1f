"""`/v1/work`: for workers alone."""

import time

from fastapi import APIRouter, Request, Response
from starlette.concurrency import run_in_threadpool

from fedssl.protocol.work import (
    Claim,
    Decline,
    Heartbeat,
    HeartbeatReply,
    Register,
    Registered,
    Submit,
    Submitted,
    WorkItem,
)
from fedssl_coordinator.auth import WaitingWorkerId, WorkerId
from fedssl_coordinator.db import DB, transaction
from fedssl_coordinator.nudges import WORK_CHANNEL
from fedssl_coordinator.settings import settings
from fedssl_coordinator.work import service

router = APIRouter(prefix="/v1/work", tags=["work"])

POLL_SECONDS = 2.0  # while a claim waits it looks this often even if no wake-up comes, for Redis may be down


@router.post("/register")
def register(request: Register, client_id: WorkerId, session: DB) -> Registered:
    """A worker's introduction, at its start."""
    return service.register(session, client_id, request)


@router.post("/heartbeat")
def heartbeat(request: Heartbeat, client_id: WorkerId, session: DB) -> HeartbeatReply:
    """Renew a lease and report progress."""
    return service.heartbeat(session, client_id, request)


def _claim(client_id: str) -> WorkItem | None:
    with transaction() as session:
        return service.claim(session, client_id)


@router.post("/claim", responses={204: {"description": "Nothing to do at the moment: ask again."}})
async def claim(claim: Claim, request: Request, client_id: WaitingWorkerId) -> WorkItem | None:
    """Lease an assignment, waiting for one to appear. Holds no database connection while it waits."""
    end = time.monotonic() + min(claim.wait_seconds, settings().claim_wait_seconds)
    with request.app.state.wakeups.listen(WORK_CHANNEL) as woken:
        while True:
            item = await run_in_threadpool(_claim, client_id)
            left = end - time.monotonic()
            if item is not None or left <= 0 or await request.is_disconnected():
                # 204 where there is nothing: FastAPI would send `null`.
                return item if item is not None else Response(status_code=204)  # type: ignore[return-value]
            await woken.wait(min(left, POLL_SECONDS))


@router.post("/submit")
def submit(request: Submit, client_id: WorkerId, session: DB) -> Submitted:
    """Hand in an uploaded update."""
    return service.submit(session, client_id, request)


@router.post("/decline")
def decline(request: Decline, client_id: WorkerId, session: DB) -> Submitted:
    """Give an assignment back, with the reason."""
    return service.decline(session, client_id, request)
