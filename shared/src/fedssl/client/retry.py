"""How long to retry a request, and how long to wait between attempts. Does no I/O except to sleep."""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from fedssl.backoff import Backoff
from fedssl.client.errors import ApiError, TooManyRequests, TryAgain, Unavailable, Unreachable

T = TypeVar("T")

log = logging.getLogger("fedssl.client")


@dataclass(frozen=True, slots=True)
class Retry:
    """Retry for up to `seconds` (0 means one attempt), waiting `first_delay`, then twice that, up to `max_delay`.

    Each wait is random, between half of that and all of it, so that the clients of a cohort do not retry together.
    """

    seconds: float = 30.0
    first_delay: float = 0.1
    max_delay: float = 5.0


DEFAULT_RETRY = Retry()


class RetryTimer:
    """The waits between one call's attempts, and its deadline. `progress()` restarts both."""

    def __init__(self, retry: Retry) -> None:
        self._seconds = retry.seconds
        self._backoff = Backoff(retry.first_delay, retry.max_delay, jitter=True)
        self.progress()

    def progress(self) -> None:
        """Restart the deadline and the backoff, because the call got further."""
        self.alive()
        self._backoff.reset()

    def alive(self) -> None:
        """Restart the deadline because bytes arrived, even if they were sent before.

        The backoff stays, so a peer that disconnects immediately is not retried at once.
        """
        self._end = self._confirmed_end = time.monotonic() + self._seconds

    def bytes_sent(self) -> None:
        """Restart the deadline because bytes were sent; `bytes_lost` revokes this, and `progress` confirms it."""
        self._end = time.monotonic() + self._seconds

    def bytes_lost(self, error: Exception) -> None:
        """Restore the deadline from before `bytes_sent`: the bytes did not arrive. Raises `error` if it has passed."""
        self._end = self._confirmed_end
        if time.monotonic() > self._end:
            raise error

    def wait(self, error: Exception) -> None:
        """Sleep before the next attempt, or raise `error` if the deadline comes first."""
        wanted = error.retry_after if isinstance(error, ApiError) else None
        delay = self._backoff.next_delay(at_least=wanted or 0.0)
        if time.monotonic() + delay > self._end:
            raise error
        log.warning("%s Trying again in %.1f s.", error, delay)
        time.sleep(delay)


def is_temporary(error: Exception, *, idempotent: bool = True) -> bool:
    """Return whether the request may succeed later, and may be sent again without doing its work twice."""
    if isinstance(error, Unreachable):
        return idempotent or not error.maybe_sent
    return isinstance(error, TooManyRequests | TryAgain) or (isinstance(error, Unavailable) and idempotent)


def with_retries(attempt: Callable[[], T], retry: Retry, *, idempotent: bool = True) -> T:
    """Return the result of the first successful `attempt`.

    Raises a permanent error immediately, and a temporary one when the time is used up.
    """
    timer = RetryTimer(retry)
    while True:
        try:
            return attempt()
        except (Unreachable, ApiError) as error:
            if not is_temporary(error, idempotent=idempotent):
                raise
            timer.wait(error)
