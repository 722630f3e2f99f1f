"""How long to keep asking, and how long to wait in between. No I/O but the sleep."""

import logging
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from fedssl.client.errors import ApiError, TooManyRequests, TryAgain, Unavailable, Unreachable

T = TypeVar("T")

log = logging.getLogger("fedssl.client")


@dataclass(frozen=True, slots=True)
class Retry:
    """Keep trying for up to `seconds` (0: one attempt), waiting `first_delay`, then twice that, up to `max_delay`.

    Every wait is drawn between half of that and the whole, so that a cohort does not come back in step.
    """

    seconds: float = 30.0
    first_delay: float = 0.1
    max_delay: float = 5.0


DEFAULT_RETRY = Retry()


class Backoff:
    """One call's waits. `progress()` starts the count anew: what moves on is not given up."""

    def __init__(self, retry: Retry) -> None:
        self._retry = retry
        self.progress()

    def progress(self) -> None:
        self._end = self._sure_end = time.monotonic() + self._retry.seconds
        self._delay = self._retry.first_delay

    def alive(self) -> None:
        """Something has arrived, if nothing new: the time starts anew, but who breaks off at once is not rushed."""
        self._end = self._sure_end = time.monotonic() + self._retry.seconds

    def presume(self) -> None:
        """Bytes have left, and may have arrived: count from now on, until `progress` or `in_vain` says which."""
        self._end = time.monotonic() + self._retry.seconds

    def in_vain(self, error: Exception) -> None:
        """They have not arrived. Raises `error` when the time since the last progress is used up."""
        self._end = self._sure_end
        if time.monotonic() > self._end:
            raise error

    def wait(self, error: Exception) -> None:
        """Sleep before the next attempt, or raise `error` when the time is used up."""
        delay = self._delay * (0.5 + random.random() / 2)
        self._delay = min(2 * self._delay, self._retry.max_delay)
        if isinstance(error, ApiError) and error.retry_after is not None:
            delay = max(delay, error.retry_after)
        if time.monotonic() + delay > self._end:
            raise error
        log.warning("%s Trying again in %.1f s.", error, delay)
        time.sleep(delay)


def is_temporary(error: Exception, *, idempotent: bool = True) -> bool:
    """Whether the same request may succeed later, and may be sent again without doing its work twice."""
    if isinstance(error, Unreachable):
        return idempotent or not error.maybe_sent
    return isinstance(error, TooManyRequests | TryAgain) or (isinstance(error, Unavailable) and idempotent)


def with_retries(attempt: Callable[[], T], retry: Retry, *, idempotent: bool = True) -> T:
    """The first success of `attempt`. Raises its last error when the time is used up, and any lasting one at once."""
    backoff = Backoff(retry)
    while True:
        try:
            return attempt()
        except (Unreachable, ApiError) as error:
            if not is_temporary(error, idempotent=idempotent):
                raise
            backoff.wait(error)
