"""A TCP proxy that records every byte that a worker sends, and parses those bytes as HTTP requests."""

import contextlib
import socket
import threading
from dataclasses import dataclass
from urllib.parse import urlsplit

from support.listening import Listener

_CHUNK = 1 << 16


@dataclass(frozen=True)
class Request:
    """One request as it was transferred; `num_bytes` counts its head and its body."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes
    num_bytes: int


class RecordingProxy(Listener):
    """Listens on its own port and passes everything on to `url`, in both directions."""

    def __init__(self, url: str) -> None:
        super().__init__()
        parts = urlsplit(url)
        self._target = (parts.hostname or "", parts.port or 80)
        self._sent: list[bytearray] = []

    @property
    def num_bytes(self) -> int:
        """The number of bytes that were sent, over all connections."""
        return sum(map(len, self._sent))

    def requests(self) -> list[Request]:
        """Return the bytes sent as HTTP/1.1 requests. Raises ValueError if bytes belong to no request."""
        return [request for sent in self._sent for request in parse_requests(bytes(sent))]

    def _serve(self, client: socket.socket) -> None:
        server = socket.create_connection(self._target)
        record = bytearray()
        self._sent.append(record)
        threading.Thread(target=_pass_on, args=(server, client, None), daemon=True).start()
        _pass_on(client, server, record)


def _pass_on(source: socket.socket, target: socket.socket, record: bytearray | None) -> None:
    with contextlib.suppress(OSError):
        while received := source.recv(_CHUNK):
            if record is not None:
                record += received
            target.sendall(received)
    with contextlib.suppress(OSError):
        target.shutdown(socket.SHUT_WR)


def parse_requests(sent: bytes) -> list[Request]:
    """Return the requests of one connection. Raises ValueError if there is anything between or after them."""
    found = []
    while sent:
        head, separator, rest = sent.partition(b"\r\n\r\n")
        first, *lines = head.decode("latin-1").split("\r\n")
        if not separator or not first.endswith(" HTTP/1.1"):
            raise ValueError(f"no request: {sent[:200]!r}")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        if "transfer-encoding" in headers:
            raise ValueError("a body of unknown length")
        length = int(headers.get("content-length", 0))
        if len(rest) < length:
            raise ValueError("a body that was broken off")
        method, path, _ = first.split(" ")
        total = len(head) + len(separator) + length
        found.append(Request(method, path, headers, rest[:length], total))
        sent = rest[length:]
    return found
