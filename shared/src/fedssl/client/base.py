"""What the operator's and the worker's client have in common."""

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
    """What both clients share: one connection, closed by the `with` block."""

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
        """`may_go_to`: whether an object store that the coordinator names, https://HOST:PORT, is one to go to."""
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
        """The coordinator's address."""
        return self._connection.url

    def health(self) -> Health:
        """Whether the coordinator's process answers. One attempt, no token needed."""
        return self._connection.call("GET", "/healthz", Health, retry=Retry(seconds=0))

    def clock_difference_seconds(self) -> float:
        """How far the coordinator's clock is ahead of this machine's, negative: behind; to about a second.

        One attempt, no token needed. Raises BadAnswer where no time is told.
        """
        asked = time.time()
        with self._connection.stream("GET", "/healthz") as response:
            read(response)
            told = response.headers.get("Date", "")
        answered = time.time()
        try:
            theirs = parsedate_to_datetime(told).timestamp() + 0.5  # told to the second, rounded down
        except (ValueError, TypeError, ArithmeticError, LookupError):
            raise BadAnswer(f"{self.url} sent no valid Date header: is there a proxy in between?") from None
        return 0.0 if asked <= theirs <= answered else min(theirs - asked, theirs - answered, key=abs)

    def ready(self) -> Health:
        """Whether the coordinator and all that it needs answer; `unavailable` is an answer, not an error.

        One attempt, no token needed. Raises Unreachable when nothing answers.
        """
        with self._connection.stream("GET", "/readyz", accepted=(503,)) as response:
            return parse(Health, read(response), "GET /readyz")
