"""The part that the operator's and the worker's clients share."""

import time
from email.utils import parsedate_to_datetime
from types import TracebackType
from typing import Self

import httpx

from fedssl.client.connection import Connection, parse, read
from fedssl.client.direct_transfer import MayGoTo
from fedssl.client.errors import BadAnswer
from fedssl.client.retry import DEFAULT_RETRY, Retry
from fedssl.client.tls import DEFAULT_TLS, Tls
from fedssl.protocol.views import Health


class BaseClient:
    """The base class of both clients: one connection, which the `with` block closes."""

    def __init__(
        self,
        url: str,
        token: str = "",
        *,
        timeout: float = 30.0,
        retry: Retry = DEFAULT_RETRY,
        tls: Tls = DEFAULT_TLS,
        transport: httpx.BaseTransport | None = None,
        may_go_to: MayGoTo = lambda server: True,
    ) -> None:
        """Create a client. `may_go_to` returns whether to use an object store that the coordinator names.

        It receives the store's address, https://HOST:PORT.
        """
        self._connection = Connection(
            url, token, timeout=timeout, retry=retry, tls=tls, transport=transport, may_go_to=may_go_to
        )

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._connection.url!r})"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""
        self._connection.close()

    @property
    def url(self) -> str:
        """Return the coordinator's address."""
        return self._connection.url

    def health(self) -> Health:
        """Check that the coordinator's process responds. Makes one attempt, and needs no token."""
        return self._connection.call("GET", "/healthz", Health, retry=Retry(seconds=0))

    def clock_difference_seconds(self) -> float:
        """Return how far the coordinator's clock is ahead of this machine's, to about a second; negative if behind.

        Makes one attempt, and needs no token. Raises BadAnswer if the response has no valid Date header.
        """
        asked = time.time()
        with self._connection.stream("GET", "/healthz") as response:
            read(response)
            told = response.headers.get("Date", "")
        answered = time.time()
        try:
            theirs = parsedate_to_datetime(told).timestamp() + 0.5  # the header has whole seconds, rounded down
        except (ValueError, TypeError, ArithmeticError, LookupError):
            raise BadAnswer(f"{self.url} sent no valid Date header: is there a proxy in between?") from None
        return 0.0 if asked <= theirs <= answered else min(theirs - asked, theirs - answered, key=abs)

    def ready(self) -> Health:
        """Return whether the coordinator and all that it needs respond; `unavailable` is a result, not an error.

        Makes one attempt, and needs no token. Raises Unreachable if there is no response.
        """
        with self._connection.stream("GET", "/readyz", accepted=(503,)) as response:
            return parse(Health, read(response), "GET /readyz")
