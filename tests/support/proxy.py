"""A TCP proxy on loopback whose connections break."""

import contextlib
import socket
import struct
import threading
import time
from urllib.parse import urlsplit

from support.listening import Listener

_RESET = struct.pack("ii", 1, 0)  # SO_LINGER with no time: close() sends RST
_MOST = 1 << 16


class BreakingProxy(Listener):
    """Passes connections on to one server, and resets each after a number of bytes or seconds.

    `bytes_per_second` limits each direction of a connection. `target` may be changed, as if a server had moved.
    """

    def __init__(
        self,
        url: str,
        *,
        after_bytes: int | None = None,
        after_seconds: float | None = None,
        bytes_per_second: float | None = None,
    ) -> None:
        super().__init__()
        parts = urlsplit(url)
        self.target = (parts.hostname or "127.0.0.1", parts.port or 80)
        self.after_bytes = after_bytes
        self.after_seconds = after_seconds
        self.bytes_per_second = bytes_per_second
        self.num_cuts = 0
        self.num_bytes = 0
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _MOST)  # so that a connection buffers little
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()

    def __exit__(self, *_: object) -> None:
        super().__exit__()
        self.cut()

    def cut(self) -> None:
        """Break every connection now."""
        with self._lock:
            connections, self._open = self._open, set()
        _reset(*connections)

    def _serve(self, client: socket.socket) -> None:
        try:
            server = socket.create_connection(self.target, timeout=5)
        except OSError:
            client.close()
            return
        _Link(self, client, server).start()

    def _forget(self, *connections: socket.socket) -> None:
        with self._lock:
            self._open.difference_update(connections)


class _Link:
    """One connection: two directions, and the bytes of both."""

    def __init__(self, proxy: BreakingProxy, client: socket.socket, server: socket.socket) -> None:
        self._proxy = proxy
        self._ends = (client, server)
        self._begun = time.monotonic()
        self._passed = 0
        server.settimeout(None)
        with proxy._lock:
            proxy._open.update(self._ends)

    def start(self) -> None:
        client, server = self._ends
        for source, sink in ((client, server), (server, client)):
            threading.Thread(target=self._pass_on, args=(source, sink), daemon=True).start()

    def _pass_on(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(_MOST):
                if rate := self._proxy.bytes_per_second:
                    time.sleep(len(data) / rate)
                sink.sendall(data)
                self._passed += len(data)
                self._proxy.num_bytes += len(data)
                if self._is_due():
                    self._break()
                    return
        for end in self._ends:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()
        self._proxy._forget(*self._ends)

    def _is_due(self) -> bool:
        most, seconds = self._proxy.after_bytes, self._proxy.after_seconds
        return (most is not None and self._passed >= most) or (
            seconds is not None and time.monotonic() - self._begun >= seconds
        )

    def _break(self) -> None:
        self._proxy.num_cuts += 1
        _reset(*self._ends)
        self._proxy._forget(*self._ends)


def _reset(*connections: socket.socket) -> None:
    """Reset connections, even if data is still in transit."""
    for connection in connections:
        with contextlib.suppress(OSError):
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            connection.shutdown(socket.SHUT_RDWR)
        connection.close()
