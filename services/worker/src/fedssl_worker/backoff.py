"""Waits for a coordinator that does not respond."""

import time
from collections.abc import Callable
from typing import TypeVar

import structlog

from fedssl.backoff import Backoff
from fedssl.client import (
    ApiError,
    BadAnswer,
    ClientError,
    NotAllowed,
    NotAuthenticated,
    ServerError,
    TooManyRequests,
    TryAgain,
    Unreachable,
)
from fedssl.errors import FedSSLError
from fedssl.liveness import Health, report

log = structlog.get_logger()

T = TypeVar("T")

TEMPORARY = (Unreachable, ServerError, TooManyRequests, TryAgain)
"""Errors after which the same request may succeed later."""

_MAX_RETRY_AFTER_SECONDS = 300.0


PROXY_REFUSED = (
    "something between this worker and the coordinator (a proxy, a sign-in page) refuses its requests: let it pass them"
)


class Refused(FedSSLError):
    """The coordinator refuses this worker, and will refuse it if asked again."""


def is_refusal(error: Exception) -> bool:
    """Return whether the coordinator itself refuses this worker: 401 or 403, with the coordinator's own explanation.

    Without that explanation, the response is a proxy's: a person will repair the proxy, and the worker retries until
    then.
    """
    return isinstance(error, NotAuthenticated | NotAllowed) and bool(error.slug)


def is_garbled(error: ClientError) -> bool:
    """Return whether the response was not a coordinator's, but a proxy's page or something that cannot be read."""
    return isinstance(error, BadAnswer) or (isinstance(error, ApiError) and not error.slug)


def retry_until_answered(ask: Callable[[], T], backoff: Backoff) -> T:
    """Return the coordinator's response, however long it takes to reach it. Raises Refused."""
    while True:
        try:
            answer = ask()
        except TEMPORARY as error:
            wanted = (error.retry_after or 0.0) if isinstance(error, ApiError) else 0.0
            delay = backoff.next_delay(at_least=min(wanted, _MAX_RETRY_AFTER_SECONDS))
            log.warning("coordinator.unreachable", reason=str(error), retry_in_seconds=delay)
            report(Health.UNREADY, str(error))
            time.sleep(delay)
        except ClientError as error:
            if not is_garbled(error):
                raise Refused(str(error)) from error
            delay = backoff.next_delay()
            log.error("coordinator.answer_invalid", reason=str(error), retry_in_seconds=delay)
            report(Health.UNREADY, str(error))
            time.sleep(delay)
        else:
            backoff.reset()
            return answer
