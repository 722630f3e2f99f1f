"""Waiting for a coordinator that does not answer."""

import time
from collections.abc import Callable
from typing import TypeVar

import structlog

from fedssl.backoff import Backoff
from fedssl.client import ApiError, ClientError, ServerError, TooManyRequests, TryAgain, Unreachable
from fedssl.errors import FedSSLError

log = structlog.get_logger()

T = TypeVar("T")

TEMPORARY = (Unreachable, ServerError, TooManyRequests, TryAgain)
"""Errors after which the same request may succeed later."""

_MAX_RETRY_AFTER_SECONDS = 300.0


class Refused(FedSSLError):
    """The coordinator refuses this worker, and will refuse it if asked again."""


def retry_until_answered(ask: Callable[[], T], backoff: Backoff) -> T:
    """Return the coordinator's answer, however long it takes to reach it. Raises Refused."""
    while True:
        try:
            answer = ask()
        except TEMPORARY as error:
            wanted = (error.retry_after or 0.0) if isinstance(error, ApiError) else 0.0
            delay = backoff.next_delay(at_least=min(wanted, _MAX_RETRY_AFTER_SECONDS))
            log.warning("coordinator.unreachable", reason=str(error), retry_in_seconds=delay)
            time.sleep(delay)
        except ClientError as error:
            raise Refused(str(error)) from error
        else:
            backoff.reset()
            return answer
