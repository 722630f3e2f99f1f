"""A proxy of a company: it passes TLS connections on by CONNECT, and records to where."""

import socket
import threading

from support.listening import Listener

_MOST = 1 << 16


class ConnectProxy(Listener):
    """Passes connections on to `servers`, which maps HOST:PORT as callers write it to an address. Refuses others."""

    def __init__(self, servers: dict[str, tuple[str, int]], host: str = "127.0.0.1") -> None:
        super().__init__(host)
        self._servers = servers
        self.connected: list[str] = []

    def _serve(self, client: socket.socket) -> None:
        with client:
            head = b""
            while b"\r\n\r\n" not in head:
                if not (data := client.recv(_MOST)):
                    return
                head += data
            method, target, _ = head.decode().split(" ", 2)
            if method != "CONNECT" or target not in self._servers:
                client.sendall(b"HTTP/1.1 403 Forbidden\r\n\r\n")
                return
            self.connected.append(target)
            with socket.create_connection(self._servers[target]) as server:
                client.sendall(b"HTTP/1.1 200 Connection established\r\n\r\n")
                threading.Thread(target=_pass_on, args=(server, client), daemon=True).start()
                _pass_on(client, server)


def _pass_on(source: socket.socket, target: socket.socket) -> None:
    try:
        while data := source.recv(_MOST):
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)
    except OSError:
        return
