"""The claims that this process holds open. One query to Postgres serves all of them."""

import contextlib
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Iterator

import structlog
from sqlalchemy.exc import SQLAlchemyError

from fedssl_coordinator.core.db import transaction
from fedssl_coordinator.core.enqueue import WORK_CHANNEL
from fedssl_coordinator.core.pubsub import Listener, Wakeups, in_background
from fedssl_coordinator.core.threads import run_transaction
from fedssl_coordinator.federation.site_evaluations import repository as site_evaluations
from fedssl_coordinator.federation.work import repository
from fedssl_coordinator.identity.authentication import Caller
from fedssl_coordinator.identity.tokens import repository as tokens

log = structlog.get_logger(__name__)

POLL_SECONDS = 2.0  # seconds between two checks without a wake-up, because Redis may be down


class WaitingClaims:
    """Wakes the claims that have work to take, or whose token has ended.

    A wake-up through Redis reaches the workers of all runs. If each claim checked on its own, a thousand waiting claims
    would cause a thousand transactions per wake-up, and five hundred per second while nothing happens.
    """

    def __init__(self, wakeups: Wakeups) -> None:
        self.num_wakeups = 0
        """How often the claims of this process were woken. If it is the same before a claim and once the claim waits,
        every offer made in between wakes it."""
        self._wakeups = wakeups
        self._waiting: defaultdict[Caller, set[Listener]] = defaultdict(set)
        self._evaluating: Counter[Caller] = Counter()

    @contextlib.contextmanager
    def wait(self, caller: Caller, *, site_evaluations: bool = False) -> Iterator[Listener]:
        """Yield a listener that is woken when the caller should check for work.

        `site_evaluations`: it is also woken for an evaluation at its site.
        """
        listener = Listener()
        self._waiting[caller].add(listener)
        self._evaluating[caller] += site_evaluations
        try:
            yield listener
        finally:
            self._waiting[caller].discard(listener)
            self._evaluating[caller] -= site_evaluations
            if not self._waiting[caller]:
                del self._waiting[caller], self._evaluating[caller]

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Check for all waiting claims for the length of the block."""
        async with in_background(self._check_repeatedly()):
            yield

    async def _check_repeatedly(self) -> None:
        with self._wakeups.listen(WORK_CHANNEL) as woken:
            while True:
                self.num_wakeups += await woken.wait(POLL_SECONDS)
                if not self._waiting:
                    continue
                try:
                    found = await run_transaction(_to_wake, list(self._waiting), set(+self._evaluating))
                except SQLAlchemyError as error:
                    log.warning("postgres.unreachable", error=type(error).__name__, consequence="claims wait longer")
                    continue
                except Exception:  # a later check may succeed, and this is the only loop that checks
                    log.exception("waiting_claims.check_failed", consequence="claims wait longer")
                    continue
                for caller in found:
                    for listener in self._waiting.get(caller, ()):
                        listener.wake()


def _to_wake(callers: list[Caller], evaluating: set[Caller]) -> list[Caller]:
    """Return the callers whose token has ended and those that have an assignment, or an evaluation, to claim."""
    with transaction() as session:
        valid = tokens.still_valid(session, [caller.token_id for caller in callers])
        clients = {caller.client_id for caller in callers if caller.client_id is not None}
        offered = repository.with_work(session, sorted(clients))
        sites = {caller.client_id for caller in evaluating if caller.client_id is not None}
        evaluated = site_evaluations.offered_to(session, sorted(sites)) if sites else set()
    return [
        caller
        for caller in callers
        if caller.token_id not in valid
        or caller.client_id in offered
        or (caller in evaluating and caller.client_id in evaluated)
    ]
