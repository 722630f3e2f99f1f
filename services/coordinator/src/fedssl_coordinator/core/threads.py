"""Runs the work of requests in threads: short transactions in a few, and what waits for a disk or a network in others.

Starlette's `run_in_threadpool`, which is for rare requests, costs twice the CPU time (docs/contributing/log.md).
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from typing import TypeVar

from sqlalchemy.exc import TimeoutError as PoolTimeout

from fedssl_coordinator.core.settings import settings

T = TypeVar("T")

# With 40 threads for transactions, fifty workers cost the API 1.4 times and Postgres four times the CPU time: threads
# wait for the interpreter's lock, and transactions for one another's rows (docs/contributing/log.md).
_transactions = ThreadPoolExecutor(10, "transactions")
_waiting = ThreadPoolExecutor(40, "waiting")  # as many as Starlette's


async def run_transaction(work: Callable[..., T], *arguments: object) -> T:
    """Return `work(*arguments)`, which is a short transaction, computed in a thread.

    Only a few such calls of a process run at a time. The others wait for their turn, as long as one may wait for a
    connection. Work that waits for a network or a disk belongs in `run_in_thread`.

    Raises:
        sqlalchemy.exc.TimeoutError: the turn did not come, as if there was no connection.
    """
    turn = _transactions.submit(copy_context().run, work, *arguments)
    is_late = False

    def give_up() -> None:
        nonlocal is_late
        is_late = turn.cancel()  # has no effect on work that has begun

    deadline = asyncio.get_running_loop().call_later(settings().database_wait_seconds, give_up)
    try:
        return await asyncio.wrap_future(turn)
    except asyncio.CancelledError:
        if is_late:
            raise PoolTimeout("all threads for transactions are busy") from None
        raise
    finally:
        deadline.cancel()


async def run_in_thread(work: Callable[..., T], *arguments: object) -> T:
    """Return `work(*arguments)`, which may wait for a network or a disk, computed in a thread."""
    return await asyncio.wrap_future(_waiting.submit(copy_context().run, work, *arguments))
