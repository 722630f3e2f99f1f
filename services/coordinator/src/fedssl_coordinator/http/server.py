"""Serves the API, with TLS or only on this machine, and health on a listener of its own."""

import asyncio
import contextlib
import ctypes
import functools
import gc
import resource
import socket
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import structlog
import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send

from fedssl.client.addresses import is_loopback
from fedssl.errors import FedSSLError
from fedssl_coordinator.core.problems import ProblemError, problem_response
from fedssl_coordinator.core.settings import settings
from fedssl_coordinator.http.addresses import proxies
from fedssl_coordinator.http.connections import Connections
from fedssl_coordinator.http.protocol import LimitedProtocol

log = structlog.get_logger(__name__)

KEEP_ALIVE_SECONDS = 20  # longer than the pauses between a worker's requests while it trains
HEALTH_PATHS = ("/healthz", "/readyz", "/metrics")
_HEALTH_CONNECTIONS = 100
_STOP_SECONDS = 3
_NEW_OBJECTS = 20_000  # new objects between two garbage collections; with Python's 700, each request causes some
_BACKLOG = 2048  # connections that wait to be accepted
_OTHER_FILES = 256  # besides connections: Postgres, Redis, artifacts
# For glibc's mallopt: blocks up to the first size are taken from memory that is kept, and as much free memory as the
# second is kept at the end of each heap.
_KEPT_BYTES = {-3: 4 << 20, -1: 16 << 20}  # M_MMAP_THRESHOLD, M_TRIM_THRESHOLD


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
    _allow_files(settings().max_connections + _HEALTH_CONNECTIONS + settings().database_connections + _OTHER_FILES)
    settle_memory()
    server = Server(config)
    with contextlib.suppress(KeyboardInterrupt):
        server.run()
    if not server.started:  # the log has the reason
        raise SystemExit(3)


def settle_memory() -> None:
    """Configure the process to search for garbage less often, and to keep the memory of bodies for the next ones.

    Requests leave hardly any garbage that needs a search. Memory that is returned to the system and taken again costs a
    page fault per 4 KiB (docs/contributing/log.md).
    """
    gc.collect()
    gc.freeze()  # what was imported stays, and need not be searched repeatedly
    gc.set_threshold(_NEW_OBJECTS, 20, 20)
    c_library = ctypes.CDLL(None)
    if hasattr(c_library, "mallopt"):  # only glibc has it
        for parameter, num_bytes in _KEPT_BYTES.items():
            c_library.mallopt(parameter, num_bytes)


def server_config(app: ASGIApp, options: ListenOptions) -> uvicorn.Config:
    """Return uvicorn's configuration for the API."""
    connections = Connections(
        settings().max_connections, settings().max_connections_per_address, settings().head_seconds
    )
    return _Config(
        app,
        connections,
        host=options.host,
        port=options.port,
        # Thousands of workers may come at once, after a restart. The kernel has its own limit: net.core.somaxconn.
        backlog=max(_BACKLOG, settings().max_connections),
        proxy_headers=options.trusted_proxies is not None,
        forwarded_allow_ips=options.trusted_proxies,
        timeout_graceful_shutdown=_STOP_SECONDS,
        ssl_certfile=options.certificate,
        ssl_keyfile=options.key,
        ssl_ca_certs=None if options.client_ca is None else str(options.client_ca),
        ssl_cert_reqs=ssl.CERT_NONE if options.client_ca is None else ssl.CERT_REQUIRED,
        ssl_context_factory=_tls_context if options.certificate is not None else None,
    )


class _Config(uvicorn.Config):
    """uvicorn's configuration, with limits for connections."""

    def __init__(self, app: ASGIApp, connections: Connections, **options: Any) -> None:
        super().__init__(
            app,
            ws="none",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
            **options,
        )
        self._connections = connections
        self.new_protocol: Callable[..., asyncio.Protocol]

    def load(self) -> None:
        super().load()
        # The protocol begins the TLS handshake, because connections are counted before it.
        tls, self.ssl = self.ssl, None
        self.new_protocol = functools.partial(
            LimitedProtocol,
            connections=self._connections,
            is_proxy=proxies(str(self.forwarded_allow_ips) if self.proxy_headers else None),
            tls=tls,
        )
        self.http_protocol_class = self.new_protocol  # type: ignore[assignment]


class Server(uvicorn.Server):
    """uvicorn's server, and in the same process and loop a listener for health if FEDSSL_HEALTH_PORT is set.

    A flood of requests to the API takes no connection of the other listener, which no client should be able to reach.
    """

    @property
    def _app(self) -> ASGIApp:
        return cast("ASGIApp", self.config.app)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        port = settings().health_port
        if self.started and port is not None:
            try:
                self.servers.append(await self._health_listener(settings().health_host, port))
            except OSError as error:
                log.error("health.cannot_listen", host=settings().health_host, port=port, reason=error.strerror)
                self.started = False
                self.should_exit = True
                for server in self.servers:
                    server.close()
                await self.lifespan.shutdown()

    async def _health_listener(self, host: str, port: int) -> asyncio.Server:
        connections = Connections(_HEALTH_CONNECTIONS, _HEALTH_CONNECTIONS, settings().head_seconds)
        config = _Config(_only_health(self._app), connections, lifespan="off", proxy_headers=False)
        config.load()
        # Both servers share this state, so these connections end too when the server stops.
        return await asyncio.get_running_loop().create_server(
            lambda: config.new_protocol(config=config, server_state=self.server_state, app_state={}),
            host,
            port,
        )


def _only_health(app: ASGIApp) -> ASGIApp:
    async def serve_health(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] in HEALTH_PATHS:
            await app(scope, receive, send)
            return
        detail = f"{scope['path']}: this listener has only {', '.join(HEALTH_PATHS)}"
        await problem_response(ProblemError("not-found", detail))(scope, receive, send)

    return serve_health


def _allow_files(needed: int) -> None:
    """Raise this process's limit of open files as far as necessary and permitted.

    Many systems set it to 1024 by default. A server that cannot open another file accepts no connection at all.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def _tls_context(config: uvicorn.Config, default: Callable[[], ssl.SSLContext]) -> ssl.SSLContext:
    context = default()
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    return context
