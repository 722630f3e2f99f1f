"""How the API listens: encrypted or on this machine alone, and with patience for nobody who holds a connection idle."""

import asyncio
import contextlib
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from fedssl.client.addresses import is_loopback
from fedssl.errors import FedSSLError
from fedssl_coordinator.core.settings import settings

KEEP_ALIVE_SECONDS = 20  # longer than the pauses between a worker's requests while it trains
_STOP_SECONDS = 3


class ServingError(FedSSLError):
    """The API cannot, or will not, listen like this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Listening:
    """Where the API listens, and who can read what is said to it.

    `client_ca`: only clients with a certificate of this authority get in (mutual TLS). `trusted_proxies`: addresses
    or networks, separated by commas, whose X-Forwarded-For is believed; None: nobody's. `is_insecure_allowed`: whether
    other machines may be served without TLS.
    """

    host: str
    port: int
    certificate: Path | None = None
    key: Path | None = None
    client_ca: Path | None = None
    trusted_proxies: str | None = None
    is_insecure_allowed: bool = False

    def check(self) -> None:
        """Raise ServingError where tokens would travel in the clear, or where the options do not fit together."""
        if (self.certificate is None) != (self.key is None):
            raise ServingError("--tls-cert and --tls-key belong together: give both, or neither")
        if self.client_ca is not None and self.certificate is None:
            raise ServingError("--tls-client-ca asks clients for a certificate: give the API's own with --tls-cert too")
        if self.certificate is None and not self.is_insecure_allowed and not is_loopback(self.host):
            raise ServingError(
                f"other machines can reach {self.host}, and without TLS anybody in between could read tokens and "
                "updates: give a certificate (--tls-cert, --tls-key); or listen on 127.0.0.1 behind a proxy that has "
                "one; or, where the network itself is private and encrypted, say --insecure-public"
            )


def serve(app: ASGIApp, listening: Listening) -> None:
    """Serve until a signal comes. Raises ServingError."""
    listening.check()
    config = server_config(app, listening)
    try:
        config.load()
    except (OSError, ssl.SSLError) as error:
        raise ServingError(f"the certificate or its key cannot be used: {error.strerror or error}") from None
    server = uvicorn.Server(config)
    with contextlib.suppress(KeyboardInterrupt):
        server.run()
    if not server.started:  # the log says why
        raise SystemExit(3)


def server_config(app: ASGIApp, listening: Listening) -> uvicorn.Config:
    """uvicorn's configuration."""
    return uvicorn.Config(
        app,
        host=listening.host,
        port=listening.port,
        http=PromptProtocol,
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=listening.trusted_proxies is not None,
        forwarded_allow_ips=listening.trusted_proxies,
        limit_concurrency=settings().max_connections,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=_STOP_SECONDS,
        ssl_certfile=listening.certificate,
        ssl_keyfile=listening.key,
        ssl_ca_certs=None if listening.client_ca is None else str(listening.client_ca),
        ssl_cert_reqs=ssl.CERT_NONE if listening.client_ca is None else ssl.CERT_REQUIRED,
        ssl_context_factory=_modern if listening.certificate is not None else None,
    )


def _modern(config: uvicorn.Config, default: Callable[[], ssl.SSLContext]) -> ssl.SSLContext:
    context = default()
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    return context


class PromptProtocol(HttpToolsProtocol):
    """uvicorn's HTTP, for clients that say what they want within `head_seconds` and `max_head_bytes`.

    uvicorn itself waits without end for the head of a request, and takes one of any length. Bodies are the business of
    those who read them.
    """

    _timer: asyncio.TimerHandle | None = None
    _num_bytes = 0
    _is_in_body = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._start_timer()

    def data_received(self, data: bytes) -> None:
        # The first bytes of the next request, or the rest of a body that has had its answer.
        if self._timer is None and (not self._is_in_body or self.cycle.response_complete):
            self._start_timer()
        self._num_bytes += len(data)
        super().data_received(data)
        if self._timer is not None and not self._is_in_body and self._num_bytes > settings().max_head_bytes:
            self._give_up()

    def on_headers_complete(self) -> None:
        self._stop_timer()
        self._is_in_body = True
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._stop_timer()
        self._is_in_body = False
        super().on_message_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def _start_timer(self) -> None:
        self._num_bytes = 0
        self._timer = self.loop.call_later(settings().head_seconds, self._give_up)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _give_up(self) -> None:
        self._stop_timer()
        if not self.transport.is_closing():
            self.transport.close()
