"""Connections to webhooks' hosts: only to public addresses, unless the operator allows others, and within a deadline.

An admin who adds a webhook must not be able to reach the servers in the coordinator's own network through it. A name is
resolved once, every address is checked, and the connection goes to the checked address.
"""

import ipaddress
import socket
import ssl
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from threading import Thread
from typing import Any

import httpcore

Network = ipaddress.IPv4Network | ipaddress.IPv6Network

_NOT_PUBLIC = tuple(
    map(
        ipaddress.ip_network,
        (
            "64:ff9b::/96",  # NAT64, which leads to an IPv4 address that was not checked
            "64:ff9b:1::/48",  # the same within one network, which Python calls global before 3.11.10
            "192.0.0.0/24",  # for protocols, and for a cloud's metadata; Python calls it global before 3.11.10
            "fec0::/10",  # site-local, an earlier form of fd00::/8
        ),
    )
)


class ForbiddenAddress(Exception):
    """A host has an address to which no notification may be sent."""


def check_address(host: str, address: str, allowed: Sequence[Network]) -> None:
    """Raise ForbiddenAddress unless the address is public or in one of the allowed networks.

    >>> check_address("example.org", "93.184.215.14", [])
    >>> check_address("internal", "::ffff:10.0.0.1", [])
    Traceback (most recent call last):
        ...
    fedssl_coordinator.notifications.public_network.ForbiddenAddress: internal has the address 10.0.0.1, ...
    """
    found = ipaddress.ip_address(address)
    if isinstance(found, ipaddress.IPv6Address) and found.ipv4_mapped is not None:
        found = found.ipv4_mapped
    if any(found in network for network in allowed):
        return
    is_tunnel = isinstance(found, ipaddress.IPv6Address) and (found.sixtofour is not None or found.teredo is not None)
    is_reserved = any(found in network for network in _NOT_PUBLIC)
    if not found.is_global or found.is_multicast or is_tunnel or is_reserved:
        raise ForbiddenAddress(
            f"{host} has the address {found}, which is not public: if notifications may go there, add its network to "
            "FEDSSL_NOTIFY_ALLOW_NETWORKS"
        )


def addresses_of(host: str, port: int, seconds: float) -> list[str]:
    """Return the addresses of a host.

    Raises httpcore.ConnectError if the name does not exist, or was not resolved within `seconds`.
    """
    found: Future[list[str]] = Future()

    def resolve() -> None:
        try:
            entries = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            found.set_result(list(dict.fromkeys(str(entry[4][0]) for entry in entries)))
        except (OSError, UnicodeError) as error:
            found.set_exception(httpcore.ConnectError(f"the name {host} cannot be resolved: {error}"))

    # The system's resolver has no deadline. Its thread ends by itself, and a process that ends does not wait for it.
    Thread(target=resolve, daemon=True).start()
    try:
        return found.result(seconds)
    except TimeoutError:
        raise httpcore.ConnectError(f"the name {host} was not resolved within {seconds:.0f} s") from None


class _Stream(httpcore.NetworkStream):
    """A connection whose every step ends at the deadline."""

    def __init__(self, stream: httpcore.NetworkStream, seconds_left: Callable[[], float]) -> None:
        self._stream = stream
        self._seconds_left = seconds_left

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        return self._stream.read(max_bytes, self._seconds_left())

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        self._stream.write(buffer, self._seconds_left())

    def close(self) -> None:
        self._stream.close()

    def start_tls(
        self, ssl_context: ssl.SSLContext, server_hostname: str | None = None, timeout: float | None = None
    ) -> httpcore.NetworkStream:
        return _Stream(self._stream.start_tls(ssl_context, server_hostname, self._seconds_left()), self._seconds_left)

    def get_extra_info(self, info: str) -> Any:
        return self._stream.get_extra_info(info)


class PublicNetwork(httpcore.NetworkBackend):
    """Connects to checked addresses only. Everything on its connections ends `seconds` after it was created."""

    def __init__(self, allowed: Sequence[Network], seconds: float) -> None:
        self._allowed = allowed
        self._end = time.monotonic() + seconds
        self._backend = httpcore.SyncBackend()

    def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[httpcore.SOCKET_OPTION] | None = None,
    ) -> httpcore.NetworkStream:
        """Connect to the first address of the host, if all of its addresses are permitted."""
        addresses = addresses_of(host, port, self._seconds_left())
        for address in addresses:
            check_address(host, address, self._allowed)
        stream = self._backend.connect_tcp(addresses[0], port, self._seconds_left(), local_address, socket_options)
        return _Stream(stream, self._seconds_left)

    def connect_unix_socket(self, path: str, timeout: float | None = None, socket_options: Any = None) -> Any:
        raise ForbiddenAddress("webhooks are not sent to sockets of this machine")

    def _seconds_left(self) -> float:
        left = self._end - time.monotonic()
        if left <= 0:
            raise httpcore.ReadTimeout("it took too long")
        return left
