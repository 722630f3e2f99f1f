"""Receivers of notifications: a webhook server and an SMTP server, both real, on ports of loopback."""

import ssl
import threading
from dataclasses import dataclass, field
from email import message_from_bytes
from email.message import Message
from typing import Any, Self

from aiosmtpd.controller import Controller
from aiosmtpd.smtp import AuthResult

from support.certificates import Pair
from support.listening import LoopbackServer, QuietHandler
from support.processes import free_port


@dataclass
class Received:
    """A request that has arrived."""

    path: str
    headers: dict[str, str]
    body: bytes


@dataclass
class Hook:
    """An HTTP server that stores its requests. It answers with the next of `statuses`, then with 204."""

    pair: Pair | None = None
    statuses: list[int] = field(default_factory=list)
    received: list[Received] = field(default_factory=list)
    silent: threading.Event = field(default_factory=threading.Event)
    """While it is set, requests are not answered."""

    def __enter__(self) -> Self:
        hook = self

        class Handler(QuietHandler):
            def do_POST(self) -> None:  # noqa: N802 - http.server's name
                body = self.rfile.read(int(self.headers["Content-Length"]))
                headers = {name.lower(): value for name, value in self.headers.items()}
                hook.received.append(Received(self.path, headers, body))
                while hook.silent.is_set():
                    hook._closed.wait(0.05)
                self.send_response(hook.statuses.pop(0) if hook.statuses else 204)
                self.send_header("Location", "http://127.0.0.1:1/elsewhere")
                self.send_header("Content-Length", "0")
                self.end_headers()

        self._closed = threading.Event()
        self._server = LoopbackServer(Handler)
        if self.pair is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(self.pair.certificate, self.pair.key)
            self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.silent.clear()
        self._closed.set()
        self._server.shutdown()
        self._server.server_close()

    @property
    def url(self) -> str:
        return f"{'http' if self.pair is None else 'https'}://127.0.0.1:{self._server.server_port}"


class MailServer:
    """An SMTP server that requires STARTTLS, a user and a password, and stores its messages."""

    def __init__(self, pair: Pair, user: str = "fedssl", password: str = "mail-password") -> None:
        self.messages: list[Message] = []
        self.is_refusing = False
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(pair.certificate, pair.key)

        def authenticate(server: Any, session: Any, envelope: Any, mechanism: str, data: Any) -> AuthResult:
            is_known = (data.login, data.password) == (user.encode(), password.encode())
            return AuthResult(success=is_known, handled=False)

        self._controller = Controller(
            self, hostname="127.0.0.1", port=free_port(), tls_context=context, require_starttls=True,
            auth_required=True, authenticator=authenticate,
        )  # fmt: skip

    async def handle_DATA(self, server: Any, session: Any, envelope: Any) -> str:  # noqa: N802 - aiosmtpd's name
        if self.is_refusing:
            return "451 try again later"
        self.messages.append(message_from_bytes(envelope.content))
        return "250 OK"

    @property
    def port(self) -> int:
        return int(self._controller.port)

    def __enter__(self) -> Self:
        self._controller.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._controller.stop()
