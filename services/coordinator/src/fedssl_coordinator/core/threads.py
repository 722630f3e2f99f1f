"""Runs short transactions in a few threads."""

from collections.abc import Callable
from typing import TypeVar

from anyio import CapacityLimiter, WouldBlock, fail_after
from anyio.lowlevel import RunVar
from sqlalchemy.exc import TimeoutError as PoolTimeout
from starlette.concurrency import run_in_threadpool

from fedssl_coordinator.core.settings import settings

T = TypeVar("T")

# With the 40 threads of the pool, fifty workers cost the API 1.4 times and Postgres four times the CPU time: threads
# wait for the interpreter's lock, and transactions for one another's rows (docs/contributing/log.md).
_NUM_AT_A_TIME = 10
_limiter: RunVar[CapacityLimiter] = RunVar("transactions")


async def run_transaction(work: Callable[..., T], *arguments: object) -> T:
    """Return `work(*arguments)`, which is a short transaction, computed in a thread.

    Only a few such calls of a process run at a time. The others wait for their turn, as long as one may wait for a
    connection. Work that waits for a network or a disk belongs in `run_in_threadpool`.

    Raises:
        sqlalchemy.exc.TimeoutError: the turn did not come, as if there was no connection.
    """
    try:
        limiter = _limiter.get()
    except LookupError:  # the first call of this event loop
        _limiter.set(limiter := CapacityLimiter(_NUM_AT_A_TIME))
    borrower = object()
    try:
        limiter.acquire_on_behalf_of_nowait(borrower)
    except WouldBlock:  # only then is a deadline needed
        try:
            with fail_after(settings().database_wait_seconds):
                await limiter.acquire_on_behalf_of(borrower)
        except TimeoutError:
            raise PoolTimeout("all threads for transactions are busy") from None
    try:
        return await run_in_threadpool(work, *arguments)
    finally:
        limiter.release_on_behalf_of(borrower)
