"""The common base of the tests' proxies and HTTP servers: a port of loopback, and a thread for each connection."""

import socket
import sys
import threading
from abc import ABC, abstractmethod
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, SimpleHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self


class Listener(ABC):
    """Accepts connections within the block."""

    def __init__(self, host: str = "127.0.0.1") -> None:
        self._listener = socket.create_server((host, 0), backlog=64)

    @property
    def port(self) -> int:
        return int(self._listener.getsockname()[1])

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> Self:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    @abstractmethod
    def _serve(self, client: socket.socket) -> None:
        """Serve a client in its own thread. An OSError ends the conversation."""

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._converse, args=(client,), daemon=True).start()

    def _converse(self, client: socket.socket) -> None:
        with suppress(OSError):
            self._serve(client)


class LoopbackServer(ThreadingHTTPServer):
    """An HTTP server on its own port."""

    daemon_threads = True

    def __init__(self, handler: Any) -> None:
        super().__init__(("127.0.0.1", 0), handler)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print an error, unless the client has closed the connection: tests kill clients."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


class QuietHandler(BaseHTTPRequestHandler):
    """A handler that does not log requests."""

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - http.server's name
        pass


class FileHandler(QuietHandler, SimpleHTTPRequestHandler):
    """Serves a folder: `functools.partial(Files, directory=...)`."""
