"""Transfers to and from the object store that the coordinator names. They use signed URLs, and never the token."""

import ipaddress
import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import httpx

from fedssl.client.addresses import is_loopback, no_cookies, origin, parsed, proxies_of_environment
from fedssl.client.deadline import TRANSFER_BYTES_PER_SECOND, Deadline, observe_deadlines, running
from fedssl.client.errors import BadAnswer, StoreUnreachable, Unavailable, Unreachable
from fedssl.client.tls import Tls, trust_error
from fedssl.protocol.errors import Problem

MayGoTo = Callable[[str], bool]
"""Returns whether bytes of artifacts may be exchanged with this server, for example https://HOST:PORT."""

log = logging.getLogger("fedssl.client")

_CONNECT_SECONDS = 5.0
_CLOSED_SECONDS = 600.0
_REFUSALS = 2  # in a row: the first may mean only that the URL has expired
_BUSY = (408, 429)
_NOT_REACHED = (httpx.ConnectError, httpx.ConnectTimeout, httpx.ProxyError)


class DirectTransfer:
    """Connections to object stores. They carry bytes of artifacts only: no token, no client certificate, no cookies.

    Redirects are not followed. Threads may share an object; its owner closes it. A store that may not or cannot be
    reached, or that refuses, is not used for ten minutes, because the coordinator has the bytes too. A store that has
    responded in the last ten minutes is retried, like the coordinator itself.
    """

    def __init__(self, coordinator: httpx.URL, tls: Tls, timeout: float, may_go_to: MayGoTo) -> None:
        self._is_local = is_loopback(coordinator.host)
        self._tls = replace(tls, client_cert=None, client_key=None)
        self._seconds = timeout
        self._timeout = httpx.Timeout(timeout, connect=min(timeout, _CONNECT_SECONDS))
        self._may_go_to = may_go_to
        self._clients: dict[tuple[str, bool], httpx.Client] = {}
        self._lock = threading.Lock()
        self._closed_until = 0.0
        self._answered_at = -math.inf
        self._num_refusals = 0
        self._logged_reason = ""

    @property
    def is_open(self) -> bool:
        """Return whether to ask the coordinator for URLs of an object store."""
        return time.monotonic() >= self._closed_until

    def close(self) -> None:
        with self._lock:
            for client in self._clients.values():
                client.close()

    @contextmanager
    def stream(
        self,
        method: str,
        url: str,
        *,
        headers: Mapping[str, str],
        content: Iterable[bytes] | None = None,
        accepted: tuple[int, ...] = (),
    ) -> Iterator[httpx.Response]:
        """Make one attempt; the block reads the response.

        Raises StoreUnreachable if the store may not or cannot be reached, or has refused two requests in a row, and
        Unavailable if it fails otherwise.
        """
        address = self._permitted(url)
        where = address.host
        deadline = Deadline(self._seconds, TRANSFER_BYTES_PER_SECOND)
        watch = {} if self._is_local else {"trace": self._watch(address)}
        try:
            with (
                running(deadline),
                self._client(address).stream(
                    method, address, headers=headers, content=content, extensions=watch
                ) as response,
            ):
                deadline.head_came()
                self._answered_at = time.monotonic()
                if not response.is_success and response.status_code not in accepted:
                    raise self._refused(where, response.status_code)
                self._num_refusals = 0
                yield response
        except httpx.TransportError as error:
            if (untrusted := trust_error(error, origin(address))) is not None:
                raise self._store_unreachable(str(untrusted)) from None
            raise self._unreachable(where, error) from None
        except httpx.HTTPError as error:
            raise BadAnswer(f"{where} gave an answer that cannot be read: {error}") from None

    def _permitted(self, url: str) -> httpx.URL:
        """Parse and check a URL. A coordinator must not send a client to a server that only that client can reach."""
        address = parsed(url)
        if address is None:
            raise BadAnswer(f"the coordinator sent an invalid object-store address: {url.partition('?')[0][:200]!r}")
        server = origin(address)
        if not self._may_go_to(server):
            raise self._store_unreachable(
                f"The data owner's policy does not name {server}, the coordinator's object store."
            )
        if is_loopback(address.host):
            if not self._is_local:
                raise self._to_this_machine(server)
        elif address.scheme == "http" and not self._tls.insecure_http:
            raise self._store_unreachable(
                f"The coordinator names an object store at {server}, an unencrypted address: it must have an https "
                "address, unless FEDSSL_INSECURE_HTTP=1 (a worker's: --insecure-http) allows this."
            )
        return address

    def _watch(self, address: httpx.URL) -> Callable[[str, dict[str, Any]], None]:
        """Return a hook that checks the peer of each new connection, whatever its name was, before anything is sent."""
        is_straight = False

        def look(event: str, info: dict[str, Any]) -> None:
            nonlocal is_straight
            if event == "connection.connect_tcp.started":
                is_straight = info["host"] == address.raw_host.decode()  # not to a proxy
            elif event == "connection.connect_tcp.complete" and is_straight:
                stream = info["return_value"]
                try:
                    is_near = _is_near(stream.get_extra_info("server_addr")[0])
                except OSError as error:  # the connection is already closed
                    stream.close()
                    raise httpx.ConnectError(str(error)) from None
                if is_near:
                    stream.close()
                    raise self._to_this_machine(origin(address))

        return look

    def _unreachable(self, where: str, error: httpx.TransportError) -> StoreUnreachable | Unreachable:
        """Return the error. A store that responded recently is retried: it may already have parts of an upload."""
        what = str(error) or type(error).__name__
        reason = (
            f"No answer from {where}, where the coordinator keeps its artifacts ({what}): check that this machine may "
            "connect to it."
        )
        has_answered_lately = time.monotonic() - self._answered_at < _CLOSED_SECONDS
        return (
            self._store_unreachable(reason)
            if isinstance(error, _NOT_REACHED) and not has_answered_lately
            else Unreachable(reason)
        )

    def _refused(self, where: str, status: int) -> StoreUnreachable | Unavailable:
        reason = f"{where}, where the coordinator keeps its artifacts, answered {status}."
        if status < 500 and status not in _BUSY:
            self._num_refusals += 1
            if self._num_refusals >= _REFUSALS:
                self._num_refusals = 0
                return self._store_unreachable(reason)
        return Unavailable(Problem(type="about:blank", title="Object store", status=status, detail=reason))

    def _to_this_machine(self, server: str) -> StoreUnreachable:
        return self._store_unreachable(
            f"The coordinator is another machine, and names an object store on this one: {server}."
        )

    def _store_unreachable(self, reason: str) -> StoreUnreachable:
        """Use no object store for ten minutes, and return the error. Logs the reason, unless it was logged last."""
        with self._lock:
            self._closed_until = time.monotonic() + _CLOSED_SECONDS
            if reason != self._logged_reason:
                log.warning("%s Artifacts pass through the coordinator instead.", reason)
            self._logged_reason = reason
        return StoreUnreachable(reason)

    def _client(self, address: httpx.URL) -> httpx.Client:
        key = (address.scheme, is_loopback(address.host))
        with self._lock:
            if key not in self._clients:
                verify = self._tls.context(address)
                with proxies_of_environment():
                    client = self._clients[key] = httpx.Client(
                        headers={"Accept-Encoding": "identity"},
                        cookies=no_cookies(),
                        timeout=self._timeout,
                        verify=verify,
                        trust_env=not key[1],
                    )
                observe_deadlines(client)
            return self._clients[key]


def _is_near(peer: str) -> bool:
    """Return whether the address is this machine's own, or link-local, where clouds serve a machine's secrets."""
    address = ipaddress.ip_address(peer)
    address = getattr(address, "ipv4_mapped", None) or address
    return address.is_loopback or address.is_link_local
