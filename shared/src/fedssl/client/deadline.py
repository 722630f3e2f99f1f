"""Deadlines for whole exchanges.

httpx limits each wait for bytes and not the exchange, so a peer that sends one byte now and then could hold it
indefinitely.
"""

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import httpcore
import httpx

T = TypeVar("T")

TRANSFER_BYTES_PER_SECOND = 128.0
"""A transfer may take hours, but one that is slower than this for the length of its time limit has stalled. The
coordinator cuts off uploads at about the same rate (`FEDSSL_STALL_BYTES` in `FEDSSL_STALL_SECONDS`)."""

_PIECE_BYTES = 1 << 16
_HEAD_BYTES = 1 << 20
_current = threading.local()


class Deadline:
    """How long an exchange may still wait for its peer: `seconds`, and more only if enough bytes pass.

    Bytes that are sent, and those of a response's body, add the time that they may take at `bytes_per_second`; at most
    `seconds` are left at any time. Those of a response's head add nothing, because a peer can send any number of heads;
    no time is left after 1 MiB of them. The time that this side needs, for example to write to a disk, does not count.
    """

    def __init__(self, seconds: float, bytes_per_second: float) -> None:
        self._seconds = self._left = seconds
        self._bytes_per_second = bytes_per_second
        self._has_head = False
        self._num_head_bytes = 0

    def head_came(self) -> None:
        """Record that the response's head is complete."""
        self._has_head = True

    def sent(self, num_bytes: int) -> None:
        """Record bytes that were sent."""
        self._left = min(self._seconds, self._left + num_bytes / self._bytes_per_second)

    def received(self, num_bytes: int) -> None:
        """Record bytes that were received."""
        if self._has_head:
            self.sent(num_bytes)
            return
        self._num_head_bytes += num_bytes
        if self._num_head_bytes > _HEAD_BYTES:
            self._left = 0.0

    def wait(self, act: Callable[[float], T], timeout: float | None, error: type[Exception]) -> T:
        """Call `act` with the seconds that it may wait, and return its result. Raises `error` if none are left."""
        if self._left <= 0:
            raise error("the exchange took too long")
        began = time.monotonic()
        try:
            return act(self._left if timeout is None else min(timeout, self._left))
        finally:
            self._left -= time.monotonic() - began


@contextmanager
def running(deadline: Deadline | None) -> Iterator[None]:
    """Apply the deadline to what this thread sends and receives in the block, or no deadline if it is None."""
    before = getattr(_current, "deadline", None)
    _current.deadline = deadline
    try:
        yield
    finally:
        _current.deadline = before


def observe_deadlines(client: httpx.Client) -> None:
    """Make a new client observe the deadlines of the threads that use it."""
    # Uses private names, because httpx has no parameter for this, and reads a proxy from the environment only if it
    # creates its transports itself.
    for transport in (client._transport, *client._mounts.values()):
        if isinstance(transport, httpx.HTTPTransport):
            transport._pool._network_backend = _Backend()


class _Backend(httpcore.SyncBackend):
    """Opens connections that observe deadlines."""

    def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.NetworkStream:
        return _Stream(super().connect_tcp(host, port, timeout, local_address, socket_options))


class _Stream(httpcore.NetworkStream):
    """A connection that observes the deadline of the thread that uses it."""

    def __init__(self, stream: httpcore.NetworkStream) -> None:
        self._stream = stream

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        deadline: Deadline | None = getattr(_current, "deadline", None)
        if deadline is None:
            return self._stream.read(max_bytes, timeout)
        data = deadline.wait(lambda left: self._stream.read(max_bytes, left), timeout, httpcore.ReadTimeout)
        deadline.received(len(data))
        return data

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        deadline: Deadline | None = getattr(_current, "deadline", None)
        if deadline is None:
            self._stream.write(buffer, timeout)
            return
        view = memoryview(buffer)
        for start in range(0, len(view), _PIECE_BYTES):
            piece = bytes(view[start : start + _PIECE_BYTES])
            deadline.wait(lambda left, piece=piece: self._stream.write(piece, left), timeout, httpcore.WriteTimeout)  # type: ignore[misc]
            deadline.sent(len(piece))

    def close(self) -> None:
        self._stream.close()

    def start_tls(
        self, ssl_context: Any, server_hostname: str | None = None, timeout: float | None = None
    ) -> httpcore.NetworkStream:
        return _Stream(self._stream.start_tls(ssl_context, server_hostname, timeout))

    def get_extra_info(self, info: str) -> Any:
        return self._stream.get_extra_info(info)
