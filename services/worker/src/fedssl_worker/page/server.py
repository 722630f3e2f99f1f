"""Serves the owner's page: on this machine only, to the browser that was given its address, and read-only."""

import hmac
import http.cookies
import secrets
import socket
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

from fedssl_worker.page.ledger_index import OUTCOMES
from fedssl_worker.page.view import View, style
from fedssl_worker.settings import SettingsError

LOOPBACK = ("127.0.0.1", "::1")
_REQUEST_SECONDS = 10
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'self'; form-action 'self'; base-uri 'none'; "
    "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}
_SIGN_IN = (
    "This page is only for the browser that was opened with the address that `fedssl-worker page` has printed. Each "
    "address works once: use the newest one."
)


class PageServer(ThreadingHTTPServer):
    """The page's server. `on_key` is called with a new address each time that one was used."""

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, host: str, port: int, view: View, on_key: Callable[[str], None]) -> None:
        """Listen. Raises SettingsError if the address is not of this machine's loopback, or is in use."""
        if host not in LOOPBACK:
            raise SettingsError(
                f"--host {host}: the page shows what left this machine, so it only listens on {' or '.join(LOOPBACK)}. "
                "To read it from elsewhere, forward a port: ssh -L 8765:127.0.0.1:8765 MACHINE"
            )
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.view = view
        self._on_key = on_key
        self._lock = threading.Lock()
        self._sessions: list[str] = []
        try:
            super().__init__((host, port), _Handler)
        except OSError as error:
            raise SettingsError(
                f"cannot listen on {host}, port {port}: {error.strerror}; choose another --port, or 0 for any"
            ) from None
        shown = f"[{host}]" if ":" in host else host
        self.netloc = f"{shown}:{self.server_port}"
        self.hosts = {self.netloc, f"localhost:{self.server_port}"}
        self.cookie = f"fedssl_page_{self.server_port}"  # a browser sends cookies to every port of a host
        self._new_key()

    def _new_key(self) -> None:
        self._key = secrets.token_urlsafe(24)
        self._on_key(f"http://{self.netloc}/?key={self._key}")

    def redeem(self, key: str) -> str | None:
        """Return a session for the key, which is invalid afterwards, or None if it is not the newest key."""
        with self._lock:
            if not hmac.compare_digest(key.encode(), self._key.encode()):
                return None
            session = secrets.token_urlsafe(24)
            self._sessions.append(session)
            self._new_key()
            return session

    def knows(self, session: str) -> bool:
        with self._lock:
            return any(hmac.compare_digest(session.encode(), known.encode()) for known in self._sessions)


class _Handler(BaseHTTPRequestHandler):
    server: PageServer
    server_version = "fedssl-worker"
    sys_version = ""
    timeout = _REQUEST_SECONDS

    def do_GET(self) -> None:
        parts = urlsplit(self.path)
        query = {name: values[-1] for name, values in parse_qs(parts.query, max_num_fields=10).items()}
        if self.headers.get("Host", "") not in self.server.hosts:  # a foreign name that leads here: DNS rebinding
            self._answer(421, f"This page answers only requests to {self.server.netloc}.")
        elif parts.path == "/page.css":
            self._answer(200, style(), "text/css; charset=utf-8")
        elif parts.path != "/":
            self._answer(404, "There is no page at this address.")
        elif "key" in query and (session := self.server.redeem(query["key"])) is not None:
            cookie = f"{self.server.cookie}={session}; HttpOnly; SameSite=Strict; Path=/"
            self._answer(303, "", headers={"Location": "/", "Set-Cookie": cookie})
        elif not self.server.knows(self._session()):
            self._answer(403, _SIGN_IN)
        else:
            self._show(query)

    def _show(self, query: dict[str, str]) -> None:
        outcome, page = query.get("outcome", ""), query.get("page", "1")
        text = self.server.view.render(
            outcome=outcome if outcome in OUTCOMES else "",
            run=query.get("run", "").strip()[:36],
            page=max(1, int(page)) if page.isascii() and page.isdecimal() and len(page) < 9 else 1,
        )
        self._answer(200, text.encode(), "text/html; charset=utf-8")

    def _session(self) -> str:
        try:
            found = http.cookies.SimpleCookie(self.headers.get("Cookie", "")).get(self.server.cookie)
        except http.cookies.CookieError:
            return ""
        return "" if found is None else found.value

    def _answer(
        self,
        status: int,
        content: bytes | str,
        media_type: str = "text/plain; charset=utf-8",
        headers: dict[str, str] | None = None,
    ) -> None:
        body = content if isinstance(content, bytes) else f"{content}\n".encode()
        self.send_response(status)
        for name, value in {**_HEADERS, **(headers or {})}.items():
            self.send_header(name, value)
        self.send_header("Content-Type", media_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - http.server's name
        """Log nothing: the line of a request contains the key."""
