"""Serves the API: with TLS or only on this machine, and with a time limit for the head of each request."""

import asyncio
import contextlib
import json
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from fedssl.client.addresses import is_loopback
from fedssl.errors import FedSSLError
from fedssl.protocol.errors import PROBLEM_MEDIA_TYPE
from fedssl_coordinator.core.problems import ProblemError
from fedssl_coordinator.core.settings import settings

KEEP_ALIVE_SECONDS = 20  # longer than the pauses between a worker's requests while it trains
_STOP_SECONDS = 3


class ServingError(FedSSLError):
    """The API cannot listen with these options, or they are not safe."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ListenOptions:
    """The address at which the API listens, and its encryption.

    `client_ca`: only clients with a certificate of this authority may connect (mutual TLS). `trusted_proxies`:
    addresses or networks, separated by commas, whose X-Forwarded-For is trusted, or None. `is_insecure_allowed`:
    whether other machines may be served without TLS.
    """

    host: str
    port: int
    certificate: Path | None = None
    key: Path | None = None
    client_ca: Path | None = None
    trusted_proxies: str | None = None
    is_insecure_allowed: bool = False

    def check(self) -> None:
        """Raise ServingError if tokens would be sent without encryption, or if the options contradict each other."""
        if (self.certificate is None) != (self.key is None):
            raise ServingError("--tls-cert and --tls-key belong together: give both, or neither")
        if self.client_ca is not None and self.certificate is None:
            raise ServingError("--tls-client-ca needs the API's own certificate too: give it with --tls-cert")
        if self.certificate is None and not self.is_insecure_allowed and not is_loopback(self.host):
            raise ServingError(
                f"other machines can reach {self.host}, and without TLS anyone in between could read tokens and "
                "updates: give a certificate (--tls-cert, --tls-key); or listen on 127.0.0.1 behind a proxy that has "
                "one; or, if the network itself is private and encrypted, use --insecure-public"
            )


def serve(app: ASGIApp, options: ListenOptions) -> None:
    """Serve until the process receives a signal. Raises ServingError."""
    options.check()
    config = server_config(app, options)
    try:
        config.load()
    except (OSError, ssl.SSLError) as error:
        raise ServingError(f"the certificate or its key cannot be used: {error.strerror or error}") from None
    server = uvicorn.Server(config)
    with contextlib.suppress(KeyboardInterrupt):
        server.run()
    if not server.started:  # the log has the reason
        raise SystemExit(3)


def server_config(app: ASGIApp, options: ListenOptions) -> uvicorn.Config:
    """Return uvicorn's configuration."""
    return uvicorn.Config(
        app,
        host=options.host,
        port=options.port,
        http=HeadLimitProtocol,
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=options.trusted_proxies is not None,
        forwarded_allow_ips=options.trusted_proxies,
        limit_concurrency=settings().max_connections,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=_STOP_SECONDS,
        ssl_certfile=options.certificate,
        ssl_keyfile=options.key,
        ssl_ca_certs=None if options.client_ca is None else str(options.client_ca),
        ssl_cert_reqs=ssl.CERT_NONE if options.client_ca is None else ssl.CERT_REQUIRED,
        ssl_context_factory=_tls_context if options.certificate is not None else None,
    )


def _tls_context(config: uvicorn.Config, default: Callable[[], ssl.SSLContext]) -> ssl.SSLContext:
    context = default()
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    return context


class HeadLimitProtocol(HttpToolsProtocol):
    """uvicorn's HTTP protocol, with limits for the head of a request: `head_seconds` and `max_head_bytes`.

    uvicorn itself waits for the head without a time limit, and accepts any length. The middlewares limit bodies.
    Trailers and chunk extensions, which no middleware sees, have the limit of a head.
    """

    _timer: asyncio.TimerHandle | None = None
    _num_bytes = 0  # since the last byte of a body, or the end of a head
    _num_field_bytes = 0  # of this request's path, headers and trailers
    _is_in_body = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._start_timer()

    def data_received(self, data: bytes) -> None:
        # The first bytes of the next request, or the rest of a body whose response has been sent.
        if self._timer is None and (not self._is_in_body or self.cycle.response_complete):
            self._start_timer()
        self._num_bytes += len(data)
        super().data_received(data)
        if self._num_bytes > settings().max_head_bytes:
            self._refuse_head()

    def on_message_begin(self) -> None:
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

    def on_body(self, body: bytes) -> None:
        self._num_bytes = 0
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

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def _start_timer(self) -> None:
        self._num_bytes = 0
        self._timer = self.loop.call_later(settings().head_seconds, self._close)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _count(self, num_bytes: int) -> None:
        """Count a part of the head. Raises an error, which ends the parsing, if it is one too many.

        A whole head may arrive at once, so that counting the bytes that wait for its end is not enough.
        """
        self._num_field_bytes += num_bytes
        if self._num_field_bytes > settings().max_head_bytes:
            raise ValueError("the head is too large")

    def _refuse_head(self) -> None:
        if not self.transport.is_closing():
            detail = f"path and headers may have {settings().max_head_bytes} bytes: send shorter ones"
            problem = ProblemError("head-too-large", detail)
            body = json.dumps(problem.body()).encode()
            head = (
                f"HTTP/1.1 {problem.status} Request Header Fields Too Large\r\ncontent-type: {PROBLEM_MEDIA_TYPE}\r\n"
                f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
            )
            self.transport.write(head.encode() + body)
        self._close()

    def _close(self) -> None:
        self._stop_timer()
        if not self.transport.is_closing():
            self.transport.close()
