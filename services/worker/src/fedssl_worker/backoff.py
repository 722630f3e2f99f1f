"""Waiting for a coordinator that does not answer."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

import structlog

from fedssl.client import ApiError, ClientError, ServerError, TooManyRequests, TryAgain, Unreachable
from fedssl.errors import FedSSLError

log = structlog.get_logger()

T = TypeVar("T")

TEMPORARY = (Unreachable, ServerError, TooManyRequests, TryAgain)
"""Errors after which the same request may succeed later."""

_MAX_RETRY_AFTER_SECONDS = 300.0


class Refused(FedSSLError):
    """The coordinator refuses this worker, and will refuse it if asked again."""


@dataclass(slots=True)
class Backoff:
    """The waits between failures: each is twice the one before, from `first` to `longest` seconds."""

    first: float = 0.5
    longest: float = 30.0
    _last: float = field(default=0.0, init=False)

    def next_delay(self, at_least: float = 0.0) -> float:
        """Return the seconds to wait after one more failure.

        Args:
            at_least: the seconds that the coordinator asked for. Above five minutes they count as five minutes.
        """
        self._last = min(max(2 * self._last, self.first), self.longest)
        return max(self._last, min(at_least, _MAX_RETRY_AFTER_SECONDS))

    def wait(self) -> None:
        """Wait after one more failure."""
        time.sleep(self.next_delay())

    def reset(self) -> None:
        """Begin with the first wait again, because something succeeded."""
        self._last = 0.0


def retry_until_answered(ask: Callable[[], T], backoff: Backoff) -> T:
    """Return the coordinator's answer, however long it takes to reach it. Raises Refused."""
    while True:
        try:
            answer = ask()
        except TEMPORARY as error:
            delay = backoff.next_delay((error.retry_after or 0.0) if isinstance(error, ApiError) else 0.0)
            log.warning("coordinator.unreachable", reason=str(error), retry_in_seconds=delay)
            time.sleep(delay)
        except ClientError as error:
            raise Refused(str(error)) from error
        else:
            backoff.reset()
            return answer
