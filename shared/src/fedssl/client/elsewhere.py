"""Requests to the object store that a coordinator names: to signed addresses, without the token."""

import ipaddress
import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from http.cookiejar import CookieJar, DefaultCookiePolicy
from typing import Any

import httpx

from fedssl.client.addresses import is_loopback, origin, parsed
from fedssl.client.errors import BadAnswer, OutOfReach, Unavailable, Unreachable
from fedssl.client.tls import Tls, trust_error
from fedssl.protocol.errors import Problem

MayGoTo = Callable[[str], bool]
"""Whether bytes of artifacts may go to and come from this server, https://HOST:PORT for one."""

log = logging.getLogger("fedssl.client")

_CONNECT_SECONDS = 5.0
_CLOSED_SECONDS = 600.0
_REFUSALS = 2  # in a row: the first may be for an address that has run out
_BUSY = (408, 429)
_NOT_REACHED = (httpx.ConnectError, httpx.ConnectTimeout, httpx.ProxyError)


class Elsewhere:
    """Connections to object stores. Bytes of artifacts go over them and nothing else: no token, no certificate of this
    side, no cookies; redirects are not followed. Shared by threads; closed by its owner.

    A store that may not or cannot be reached, or refuses, is left alone for ten minutes: the coordinator has the bytes
    as well. One that has answered in the last ten minutes is tried again, like the coordinator itself.
    """

    def __init__(self, coordinator: httpx.URL, tls: Tls, timeout: float, may_go_to: MayGoTo) -> None:
        self._is_local = is_loopback(coordinator.host)
        self._tls = replace(tls, client_cert=None, client_key=None)
        self._timeout = httpx.Timeout(timeout, connect=min(timeout, _CONNECT_SECONDS))
        self._may_go_to = may_go_to
        self._clients: dict[tuple[str, bool], httpx.Client] = {}
        self._lock = threading.Lock()
        self._closed_until = 0.0
        self._answered_at = -math.inf
        self._num_refusals = 0
        self._told = ""

    @property
    def is_open(self) -> bool:
        """Whether to ask for the addresses of an object store."""
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
        """One attempt whose answer the block reads. Raises OutOfReach where this is no store to go to, or one that has
        refused a new address too, and Unavailable where it does not do it otherwise."""
        address = self._permitted(url)
        where = address.host
        watch = {} if self._is_local else {"trace": self._watch(address)}
        try:
            with self._client(address).stream(
                method, address, headers=headers, content=content, extensions=watch
            ) as response:
                self._answered_at = time.monotonic()
                if not response.is_success and response.status_code not in accepted:
                    raise self._refused(where, response.status_code)
                self._num_refusals = 0
                yield response
        except httpx.TransportError as error:
            if (untrusted := trust_error(error, origin(address))) is not None:
                raise self._out_of_reach(str(untrusted)) from None
            raise self._unreachable(where, error) from None
        except httpx.HTTPError as error:
            raise BadAnswer(f"{where} gave an answer that cannot be read: {error}") from None

    def _permitted(self, url: str) -> httpx.URL:
        """The address, where one may go there. A coordinator must not send anybody to what only they can reach."""
        address = parsed(url)
        if address is None:
            raise BadAnswer("the coordinator names an object store at an address that is none")
        server = origin(address)
        if not self._may_go_to(server):
            raise self._out_of_reach(f"The data owner's policy does not name {server}, the coordinator's object store.")
        if is_loopback(address.host):
            if not self._is_local:
                raise self._to_this_machine(server)
        elif address.scheme == "http" and not self._tls.insecure_http:
            raise self._out_of_reach(
                f"The coordinator names an object store at {server}, where anybody in between could read along: it "
                "must have an https address, unless FEDSSL_INSECURE_HTTP=1 (a worker's: --insecure-http) allows this."
            )
        return address

    def _watch(self, address: httpx.URL) -> Callable[[str, dict[str, Any]], None]:
        """Looks where a connection has led, whatever its name has promised, before anything is sent over it."""
        is_straight = False

        def look(event: str, info: dict[str, Any]) -> None:
            nonlocal is_straight
            if event == "connection.connect_tcp.started":
                is_straight = info["host"] == address.raw_host.decode()  # and not to a proxy
            elif event == "connection.connect_tcp.complete" and is_straight:
                stream = info["return_value"]
                try:
                    is_near = _is_near(stream.get_extra_info("server_addr")[0])
                except OSError as error:  # it has gone again
                    stream.close()
                    raise httpx.ConnectError(str(error)) from None
                if is_near:
                    stream.close()
                    raise self._to_this_machine(origin(address))

        return look

    def _unreachable(self, where: str, error: httpx.TransportError) -> OutOfReach | Unreachable:
        """One that has answered lately is away, and will be back: parts of what is sent may be there already."""
        what = str(error) or type(error).__name__
        reason = (
            f"No answer from {where}, where the coordinator keeps its artifacts ({what}): check that this machine may "
            "connect to it."
        )
        is_away = time.monotonic() - self._answered_at < _CLOSED_SECONDS
        return self._out_of_reach(reason) if isinstance(error, _NOT_REACHED) and not is_away else Unreachable(reason)

    def _refused(self, where: str, status: int) -> OutOfReach | Unavailable:
        reason = f"{where}, where the coordinator keeps its artifacts, answered {status}."
        if status < 500 and status not in _BUSY:
            self._num_refusals += 1
            if self._num_refusals >= _REFUSALS:
                self._num_refusals = 0
                return self._out_of_reach(reason)
        return Unavailable(Problem(type="about:blank", title="Object store", status=status, detail=reason))

    def _to_this_machine(self, server: str) -> OutOfReach:
        return self._out_of_reach(
            f"The coordinator is another machine, and names an object store on this one: {server}."
        )

    def _out_of_reach(self, reason: str) -> OutOfReach:
        """Leave object stores alone for a while, and say why: once, while it stays the same."""
        with self._lock:
            self._closed_until = time.monotonic() + _CLOSED_SECONDS
            if reason != self._told:
                log.warning("%s Artifacts pass through the coordinator instead.", reason)
            self._told = reason
        return OutOfReach(reason)

    def _client(self, address: httpx.URL) -> httpx.Client:
        key = (address.scheme, is_loopback(address.host))
        with self._lock:
            if key not in self._clients:
                self._clients[key] = httpx.Client(
                    headers={"Accept-Encoding": "identity"},
                    cookies=CookieJar(DefaultCookiePolicy(allowed_domains=[])),
                    timeout=self._timeout,
                    verify=self._tls.context(address),
                    trust_env=not key[1],
                )
            return self._clients[key]


def _is_near(peer: str) -> bool:
    """Whether this is an address of this machine's own, or of its link, where clouds tell a machine its secrets."""
    address = ipaddress.ip_address(peer)
    address = getattr(address, "ipv4_mapped", None) or address
    return address.is_loopback or address.is_link_local
