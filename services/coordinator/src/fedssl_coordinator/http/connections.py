"""Reserves connections for known callers while others hold connections open and send nothing.

A caller is known after a request on the connection has shown a valid token or session. All other connections are
strangers', whatever they have sent. Their number is never a reason to refuse a caller: instead, the oldest connection
of the address with the most strangers' connections is closed. If all connections are known callers', one without a
request is closed, or else the oldest of the caller with the most, if it has more than one address may have.
"""

import time
from collections.abc import Callable
from typing import Protocol

GRACE_SECONDS = 1.0
"""How long every connection may take to send a head, however many there are. Thousands of workers may reconnect at
once, so many new connections do not mean that their callers send nothing."""

_LEAST_SHARE = 0.1


class Connection(Protocol):
    """A connection, as far as the limits need it."""

    address: str | None
    """The address to count by, or None for a trusted proxy, which speaks for any number of callers."""
    opened_at: float

    @property
    def is_known(self) -> bool:
        """True if a request has shown a valid token or session."""

    @property
    def caller(self) -> str | None:
        """The id of the token of the last request that has shown a valid one or its session."""

    @property
    def is_waiting(self) -> bool:
        """True if the caller must send something next: the head of a request, or the rest of its body."""

    @property
    def is_idle(self) -> bool:
        """True if no request has begun."""

    def close_now(self) -> None:
        """Close the connection without an answer."""


class Connections:
    """The connections of one server: which one to close if there are too many, and how long a head may take."""

    def __init__(
        self,
        most: int,
        most_per_address: int,
        head_seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._most = most
        self._most_strangers = max(1, most // 2)
        self._most_per_address = most_per_address
        self._head_seconds = head_seconds
        self._clock = clock
        self._known: dict[Connection, None] = {}  # oldest first, like the strangers of each address
        self._strangers: dict[str | None, dict[Connection, None]] = {}
        self._num_strangers = 0

    def add(self, connection: Connection) -> bool:
        """Count a new connection, and close another one if that is too many. Returns False if it has no place itself.

        Known callers keep half of the places: while more than half are strangers', each new connection closes one.
        """
        is_full = len(self._known) + self._num_strangers >= self._most
        if is_full:
            if not self._close_a_stranger() and not self._close_a_known():
                return False
        elif self._num_strangers >= self._most_strangers:
            self._close_a_stranger(self._clock() - GRACE_SECONDS)
        self._strangers.setdefault(connection.address, {})[connection] = None
        self._num_strangers += 1
        return True

    def remove(self, connection: Connection) -> None:
        """Forget a connection that was closed; a second time has no effect."""
        self._known.pop(connection, None)
        self._remove_stranger(connection)

    def recognise(self, connection: Connection) -> None:
        """Count the connection as a known caller's if it is one."""
        if connection.is_known and self._remove_stranger(connection):
            self._known[connection] = None

    def head_seconds(self, connection: Connection) -> float:
        """Return how long the connection may take to send a head: less if there are many strangers.

        It is `GRACE_SECONDS` if the address has more strangers' connections than it may have.
        """
        own = self._strangers.get(connection.address, {})
        if connection.address is not None and len(own) > self._most_per_address:
            for other in list(own):
                self.recognise(other)
            if connection in own and len(own) > self._most_per_address:
                return min(GRACE_SECONDS, self._head_seconds)
        share = max(_LEAST_SHARE, 1 - self._num_strangers / self._most_strangers)
        return min(self._head_seconds, max(GRACE_SECONDS, self._head_seconds * share))

    def _close_a_stranger(self, opened_before: float = float("inf")) -> bool:
        """Close the oldest connection of the address with most, or of the next one. Returns whether one was closed."""
        for own in sorted(self._strangers.values(), key=len, reverse=True):
            for connection in list(own):
                self.recognise(connection)
                if connection in own and connection.is_waiting:
                    if connection.opened_at > opened_before:
                        break  # all others of this address are younger
                    self._close(connection)
                    return True
        return False

    def _close_a_known(self) -> bool:
        """Close a connection without a request, or the oldest of a caller with too many.

        Returns whether it closed one.
        """
        found = next((each for each in self._known if each.is_idle), None)
        if found is None:
            own: dict[str | None, list[Connection]] = {}
            for each in self._known:
                own.setdefault(each.caller, []).append(each)
            most = max(own.values(), key=len, default=[])
            found = most[0] if len(most) > self._most_per_address else None
        if found is not None:
            self._close(found)
        return found is not None

    def _close(self, connection: Connection) -> None:
        self.remove(connection)
        connection.close_now()

    def _remove_stranger(self, connection: Connection) -> bool:
        own = self._strangers.get(connection.address, {})
        if connection not in own:
            return False
        del own[connection]
        self._num_strangers -= 1
        if not own:
            del self._strangers[connection.address]
        return True
