"""Proxies like those of companies, which pass on TLS connections made with CONNECT, and record their targets."""

import select
import socket
import ssl
import threading

from support.certificates import Pair
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
                self._connect(client, server, target)

    def _connect(self, client: socket.socket, server: socket.socket, target: str) -> None:
        """Pass bytes on in both directions until one side ends."""
        threading.Thread(target=_pass_on, args=(server, client), daemon=True).start()
        _pass_on(client, server)


class InspectingProxy(ConnectProxy):
    """Ends the callers' TLS with its own certificate, and uses TLS to the servers, so that it reads everything.

    `seen` has the first line of each request that callers sent on a new connection.
    """

    def __init__(self, servers: dict[str, tuple[str, int]], own: Pair, host: str = "127.0.0.1") -> None:
        super().__init__(servers, host)
        self._to_callers = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._to_callers.load_cert_chain(own.certificate, own.key)
        self._to_servers = ssl.create_default_context()
        self._to_servers.check_hostname, self._to_servers.verify_mode = False, ssl.CERT_NONE
        self.seen: list[str] = []

    def _connect(self, client: socket.socket, server: socket.socket, target: str) -> None:
        name = target.rpartition(":")[0]
        with (
            self._to_callers.wrap_socket(client, server_side=True) as inside,
            self._to_servers.wrap_socket(server, server_hostname=name) as outside,
        ):
            first = inside.recv(_MOST)
            self.seen.append(first.partition(b"\r\n")[0].decode())
            outside.sendall(first)
            _pass_on_decrypted(inside, outside)


def _pass_on(source: socket.socket, target: socket.socket) -> None:
    try:
        while data := source.recv(_MOST):
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)
    except OSError:
        return


def _pass_on_decrypted(one: ssl.SSLSocket, other: ssl.SSLSocket) -> None:
    """Pass data on in both directions until one side ends, in one thread: OpenSSL forbids two per connection."""
    while True:
        ready = [end for end in (one, other) if end.pending()] or select.select([one, other], [], [])[0]
        for source in ready:
            source.settimeout(0)
            try:
                data = source.recv(_MOST)
            except ssl.SSLWantReadError:  # part of a record, or a record of TLS itself
                continue
            finally:
                source.settimeout(None)
            if not data:
                return
            (other if source is one else one).sendall(data)
