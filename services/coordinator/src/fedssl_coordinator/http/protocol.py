"""uvicorn's HTTP protocol, with limits for connections and for the heads of requests."""

import asyncio
import json
import ssl
import time
from collections.abc import Callable
from typing import Any

import uvicorn
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from fedssl.protocol.errors import PROBLEM_MEDIA_TYPE
from fedssl_coordinator.core.problems import ProblemError
from fedssl_coordinator.core.settings import settings
from fedssl_coordinator.http.addresses import address_key
from fedssl_coordinator.http.body_limit import IS_KNOWN
from fedssl_coordinator.http.connections import GRACE_SECONDS, Connections
from fedssl_coordinator.http.zero_copy import ZeroCopy

_KNOWN_BY = (IS_KNOWN, "valid_token", "valid_session")
_LAST_SECONDS = 0.05
_NO_PLACE = b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 2\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"


class _PatientFlow(FlowControl):
    """Waits for a caller that does not read for `stall_seconds`, and then closes the connection.

    The deadline begins only when a message has to wait: a deadline per message costs more than sending it.
    """

    def __init__(self, transport: asyncio.Transport) -> None:
        super().__init__(transport)
        self._connection = transport

    async def drain(self) -> None:
        try:
            async with asyncio.timeout(settings().stall_seconds):
                await super().drain()
        except TimeoutError:
            self._connection.abort()
            await super().drain()  # until uvicorn knows that the connection is lost


class LimitedProtocol(HttpToolsProtocol):
    """Limits connections (`connections`), and the head of a request: `head_seconds` and `max_head_bytes`.

    uvicorn itself waits for the head without a time limit, accepts any length, and while it has as many connections as
    it may have, it refuses the requests of every caller. It also counts no connection whose TLS handshake has not
    ended, so the handshake begins here. The middlewares limit bodies. Trailers and chunk extensions, which no
    middleware sees, have the limit of a head.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
        *,
        connections: Connections,
        is_proxy: Callable[[str], bool],
        tls: ssl.SSLContext | None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self.address: str | None = None
        self.opened_at = time.monotonic()
        self._connections = connections
        self._is_proxy = is_proxy
        self._tls = tls
        self._handshake: asyncio.Task[None] | None = None
        self._early: bytearray | None = None
        self._is_made = False
        self._caller: str | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._num_bytes = 0  # since the last byte of a body, or the end of a head
        self._num_field_bytes = 0  # of this request's path, headers and trailers
        self._is_in_body = False

    # For `Connections`

    @property
    def is_known(self) -> bool:
        return self.caller is not None

    @property
    def caller(self) -> str | None:
        if self.scope is not None:
            state = self.scope["state"]
            self._caller = next((str(state[name]) for name in _KNOWN_BY if state.get(name)), self._caller)
        return self._caller

    @property
    def is_idle(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    @property
    def is_waiting(self) -> bool:
        return self.is_idle or self.cycle.more_body

    def close_now(self) -> None:
        self._stop_timer()
        if self._handshake is not None:
            self._handshake.cancel()
        self.transport.abort()

    # For asyncio

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.transport = transport
        host = str((transport.get_extra_info("peername") or ("",))[0])
        self.address = None if self._is_proxy(host) else address_key(host)
        if not self._connections.add(self):
            if self._tls is None:
                transport.write(_NO_PLACE)
            transport.close()
            return
        self._start_timer()
        if self._tls is None:
            self._make(transport)
        else:
            self._early = bytearray()
            self._handshake = self.loop.create_task(self._encrypt(transport, self._tls))

    def data_received(self, data: bytes) -> None:
        if self._early is not None:
            self._early += data
            return
        if not self._is_made:  # it has no place
            return
        # The first bytes of the next request, or the rest of a body whose response has been sent.
        if self._timer is None and (not self._is_in_body or self.cycle.response_complete):
            self._start_timer()
        self._num_bytes += len(data)
        super().data_received(data)
        if self._num_bytes > settings().max_head_bytes:
            self._refuse_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget()
        if self._is_made:
            super().connection_lost(exc)
        elif self._handshake is not None:
            self._handshake.cancel()

    # For the parser and uvicorn

    def on_message_begin(self) -> None:
        self._connections.recognise(self)  # by the last request
        self._num_field_bytes = 0
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(len(name) + len(value) + len(b": \r\n"))
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._stop_timer()
        self._is_in_body = True
        self._num_bytes = 0
        super().on_headers_complete()
        if self._caller is None:
            self.loop.call_later(GRACE_SECONDS, self._connections.recognise, self)  # its response may take much longer

    def on_body(self, body: bytes) -> None:
        self._num_bytes = 0
        # uvicorn collects a body in a bytearray and copies it once more for the application. Bytes that the application
        # receives before the next ones arrive need neither copy.
        if not self.cycle.body:
            self.cycle.body = body  # type: ignore[assignment]
            body = b""
        elif isinstance(self.cycle.body, bytes):
            self.cycle.body = bytearray(self.cycle.body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._stop_timer()
        self._is_in_body = False
        self._num_bytes = 0
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        if self._num_field_bytes > settings().max_head_bytes:
            self._refuse_head()
        else:
            super().send_400_response(msg)

    def on_response_complete(self) -> None:
        self._connections.recognise(self)
        super().on_response_complete()

    def _make(self, transport: asyncio.Transport) -> None:
        self._is_made = True
        super().connection_made(transport)
        self.flow = _PatientFlow(transport)
        if self._tls is None:
            self.app = ZeroCopy(self.app, transport)

    async def _encrypt(self, transport: asyncio.Transport, tls: ssl.SSLContext) -> None:
        """Carry out the TLS handshake. The timer of the first head runs already."""
        self.loop.call_soon(self._pass_early_bytes, transport)  # start_tls puts its protocol in place before this runs
        try:
            encrypted: Any = await self.loop.start_tls(
                transport, self, tls, server_side=True, ssl_handshake_timeout=settings().head_seconds
            )
        except (OSError, RuntimeError, asyncio.CancelledError):  # also of TLS, whose errors are OSErrors
            transport.abort()
            self._forget()
            return
        early, self._early = self._early, None
        self._make(encrypted)
        if early:
            self.data_received(bytes(early))

    def _pass_early_bytes(self, transport: asyncio.Transport) -> None:
        """Give TLS what came before it was in place; uvloop reads from a connection as soon as it is made."""
        protocol: Any = transport.get_protocol()
        early, self._early = self._early, bytearray()
        while early and protocol is not self:
            buffer = memoryview(protocol.get_buffer(len(early)))
            num_bytes = min(len(buffer), len(early))
            buffer[:num_bytes] = early[:num_bytes]
            del early[:num_bytes]
            protocol.buffer_updated(num_bytes)

    def _count(self, num_bytes: int) -> None:
        """Count a part of the head. Raises an error, which ends the parsing, if it is one too many.

        A whole head may arrive at once, so that counting the bytes that wait for its end is not enough.
        """
        self._num_field_bytes += num_bytes
        if self._num_field_bytes > settings().max_head_bytes:
            raise ValueError("the head is too large")

    def _refuse_head(self) -> None:
        self._stop_timer()
        if self.transport.is_closing():
            return
        detail = f"path and headers may have {settings().max_head_bytes} bytes: send shorter ones"
        problem = ProblemError("head-too-large", detail)
        body = json.dumps(problem.body()).encode()
        head = (
            f"HTTP/1.1 {problem.status} Request Header Fields Too Large\r\ncontent-type: {PROBLEM_MEDIA_TYPE}\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.transport.close()

    def _forget(self) -> None:
        self._stop_timer()
        self._connections.remove(self)

    def _start_timer(self) -> None:
        self._num_bytes = 0
        self._timer = self.loop.call_later(self._connections.head_seconds(self), self._expire)

    def _expire(self) -> None:
        # If the loop was busy for longer, the head may be here and unread: timers come before reading.
        self._timer = self.loop.call_later(_LAST_SECONDS, self.close_now)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
