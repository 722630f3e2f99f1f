"""`/v1/work`: only for workers."""

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
from fedssl_coordinator.core.openapi import problems
from fedssl_coordinator.core.settings import settings
from fedssl_coordinator.federation.ledger_anchors import service as anchors
from fedssl_coordinator.federation.work import service
from fedssl_coordinator.identity.authentication import Caller, PresentedToken, PresentedWorker, WorkerId
from fedssl_coordinator.identity.concurrency_limit import place_of

router = APIRouter(prefix="/v1/work", tags=["work"])

_GONE_SECONDS = 5.0  # between two checks that the worker of a waiting claim is still connected


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
    return await run_in_threadpool(_heartbeat, token, request)


def _heartbeat(token: PresentedToken, request: Heartbeat) -> HeartbeatReply:
    with transaction() as session:
        client_id = _client_of(token.working(session))
        reply = service.heartbeat(session, client_id, request)
        return reply.model_copy(update={"receipt": anchors.record_anchor(session, client_id, request.anchor)})


def _claim(token: PresentedToken) -> tuple[Caller, WorkItem | None]:
    with transaction() as session:
        caller = token.working(session)
        return caller, service.claim(session, _client_of(caller))


@router.post("/claim", responses={204: {"description": "There is no work now: claim again."}})
async def claim(claim: Claim, request: Request, token: PresentedWorker) -> WorkItem | None:
    """Lease an assignment, or wait for one. Holds no database connection while it waits."""
    end = time.monotonic() + min(claim.wait_seconds, settings().claim_wait_seconds)
    caller, item = await run_in_threadpool(_claim, token)
    if item is not None:
        return item
    with place_of(caller.token_id), request.app.state.waiting_claims.wait(caller) as woken:
        # It tries again first: work that came before this claim was waiting woke nobody.
        while (item := (await run_in_threadpool(_claim, token))[1]) is None:
            is_woken = False
            while not is_woken:
                left = end - time.monotonic()
                if left <= 0 or await request.is_disconnected():
                    # FastAPI would send `null`.
                    return Response(status_code=204)  # type: ignore[return-value]
                is_woken = await woken.wait(min(left, _GONE_SECONDS))
    return item


@router.post("/submit", responses=problems(404, 409, 410))
async def submit(request: Submit, token: PresentedWorker) -> Submitted:
    """Submit an uploaded update."""
    return await run_in_threadpool(_submit, token, request)


def _submit(token: PresentedToken, request: Submit) -> Submitted:
    with transaction() as session:
        client_id = _client_of(token.caller(session))
        submitted = service.submit(session, client_id, request)
        return submitted.model_copy(update={"receipt": anchors.record_anchor(session, client_id, request.anchor)})


@router.post("/ended-runs")
def ended_runs(request: EndedQuery, client_id: WorkerId, session: DB) -> EndedRuns:
    """List which of the worker's runs have ended, so that it can delete the client states that it keeps for them."""
    return service.ended_runs(session, client_id, request)


@router.post("/decline", responses=problems(404, 409, 410))
def decline(request: Decline, client_id: WorkerId, session: DB) -> Submitted:
    """Return an assignment, with the reason."""
    return service.decline(session, client_id, request)


def _client_of(caller: Caller) -> str:
    assert caller.client_id is not None, "a worker's token has a client"
    return caller.client_id
