"""The claims that this process holds open: one look at Postgres for all of them, not one for each."""

import contextlib
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator

import structlog
from sqlalchemy.exc import SQLAlchemyError
from starlette.concurrency import run_in_threadpool

from fedssl_coordinator.core.db import transaction
from fedssl_coordinator.core.enqueue import WORK_CHANNEL
from fedssl_coordinator.core.pubsub import Listener, Wakeups, in_background
from fedssl_coordinator.federation.work import repository
from fedssl_coordinator.identity.authentication import Caller
from fedssl_coordinator.identity.tokens import repository as tokens

log = structlog.get_logger(__name__)

POLL_SECONDS = 2.0  # it looks this often even if no wake-up comes, for Redis may be down


class WaitingClaims:
    """Wakes the claims for which there is something: work, or the end of their token.

    A wake-up through Redis is for all workers of all runs. Were each claim to look for itself, a thousand waiting ones
    would make a thousand transactions of it, and five hundred a second while nothing happens at all.
    """

    def __init__(self, wakeups: Wakeups) -> None:
        self._wakeups = wakeups
        self._waiting: defaultdict[Caller, set[Listener]] = defaultdict(set)

    @contextlib.contextmanager
    def wait(self, caller: Caller) -> Iterator[Listener]:
        """A listener that is woken when the caller should look. It should look once after this, too."""
        listener = Listener()
        self._waiting[caller].add(listener)
        try:
            yield listener
        finally:
            self._waiting[caller].discard(listener)
            if not self._waiting[caller]:
                del self._waiting[caller]

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Look for them for the length of the block."""
        async with in_background(self._look_on()):
            yield

    async def _look_on(self) -> None:
        with self._wakeups.listen(WORK_CHANNEL) as woken:
            while True:
                await woken.wait(POLL_SECONDS)
                if not self._waiting:
                    continue
                try:
                    found = await run_in_threadpool(_with_something, list(self._waiting))
                except SQLAlchemyError as error:
                    log.warning("postgres.unreachable", error=type(error).__name__, consequence="claims wait on")
                    continue
                except Exception:  # whatever it is, later looks may do better; nobody else looks
                    log.exception("look.failed", consequence="claims wait on")
                    continue
                for caller in found:
                    for listener in self._waiting.get(caller, ()):
                        listener.wake()


def _with_something(callers: list[Caller]) -> list[Caller]:
    """Those whose token has ended, and those that have an assignment to take."""
    with transaction() as session:
        valid = tokens.still_valid(session, [caller.token_id for caller in callers])
        clients = {caller.client_id for caller in callers if caller.client_id is not None}
        offered = repository.with_work(session, sorted(clients))
    return [caller for caller in callers if caller.token_id not in valid or caller.client_id in offered]
