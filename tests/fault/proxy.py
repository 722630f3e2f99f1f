"""A network between the workers and the coordinator that can fail on demand: one request at a time, by its path."""

import re
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Literal

from fault.injected import Injected
from fault.patience import scaled_timeout
from support.listening import Listener

Action = Literal[
    "drop", "lose-answer", "delay", "duplicate", "truncate", "truncate-answer", "hold", "hold-body", "hold-answer"
]
ACTIONS: tuple[Action, ...] = ("drop", "lose-answer", "delay", "duplicate", "truncate", "truncate-answer")
"""Faults that end by themselves."""

KINDS: dict[Action, str] = {
    "drop": "network: request dropped",
    "lose-answer": "network: answer lost",
    "delay": "network: delayed",
    "duplicate": "network: duplicated",
    "truncate": "network: request truncated",
    "truncate-answer": "network: answer truncated",
}

_DELIVERY = "POST /v1/work/deliver"
_NOT_FOUND = b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
_CHUNK = 1 << 16
_HEAD_BYTES = 1 << 16
_SECONDS = 90.0  # the longest silence on a connection: a claim waits for 25 s


@dataclass(frozen=True, slots=True)
class Request:
    """The head of a request. `start`: method and path, as in `PUT /v1/artifacts/ab12?assignment=...`."""

    start: str
    head: bytes
    length: int
    token: str


@dataclass(slots=True)
class Held:
    """A request that waits before it is passed on, after half of its body, or before its answer is passed on."""

    token: str = ""
    _is_there: threading.Event = field(default_factory=threading.Event)
    _go_on: threading.Event = field(default_factory=threading.Event)

    def wait_until_there(self) -> None:
        assert self._is_there.wait(scaled_timeout(60)), "no such request came"

    def release(self) -> None:
        self._go_on.set()

    def wait(self, token: str) -> None:
        """Wait until `release` is called. Only the proxy calls this."""
        self.token = token
        self._is_there.set()
        self._go_on.wait(_SECONDS)


@dataclass(slots=True)
class Rule:
    """The fault of the next `times` requests whose start and, if `body` is given, whose body match."""

    pattern: str
    action: Action
    times: int = 1
    body: str = ""
    seconds: float = 0.3
    held: Held = field(default_factory=Held)


class _Broken(Exception):
    """Ends the exchange: both connections are closed."""


class Proxy(Listener):
    """Listens on its own port and passes each request on to one of the upstream ports, in turn.

    It takes one request per connection. `choose` gets every request without a rule, and may return an action for it.
    """

    def __init__(self, ports: Sequence[int], injected: Injected) -> None:
        super().__init__()
        self.ports = list(ports)
        self.choose: Callable[[Request], Action | None] = lambda request: None
        self.refuses_delivery: Callable[[str], bool] = lambda token: False
        """True for the tokens of workers whose deliveries get 404, as from an older coordinator."""
        self.served: dict[int, int] = {}
        self._injected = injected
        self._rules: list[Rule] = []
        self._lock = threading.Lock()
        self._turn = 0

    def __exit__(self, *_: object) -> None:
        super().__exit__()
        for rule in self._rules:
            rule.held.release()

    @contextmanager
    def holding(self, pattern: str, action: Action = "hold") -> Iterator[Held]:
        """Hold the next request that matches, and release it at the end of the block."""
        rule = self.once(pattern, action)
        try:
            yield rule.held
        finally:
            rule.held.release()
            with self._lock:
                if rule in self._rules:
                    self._rules.remove(rule)

    @property
    def has_rules(self) -> bool:
        """Return whether a later request will be disturbed."""
        with self._lock:
            return bool(self._rules)

    def once(self, pattern: str, action: Action, times: int = 1, *, body: str = "") -> Rule:
        """Apply an action to the next requests that match. `body`: a pattern for the body, for small requests only."""
        rule = Rule(pattern, action, times, body=body)
        with self._lock:
            self._rules.append(rule)
        return rule

    def _serve(self, client: socket.socket) -> None:
        with client, suppress(_Broken):
            client.settimeout(_SECONDS)
            request, body = _read_head(client)
            if request.start == _DELIVERY and self.refuses_delivery(request.token):
                while len(body) < request.length:
                    body += _receive(client)
                client.sendall(_NOT_FOUND)
                return
            while self._reads_body_of(request) and len(body) < request.length:
                body += _receive(client)
            rule = self._rule_for(request, body)
            self._exchange(client, request, body, rule)

    def _reads_body_of(self, request: Request) -> bool:
        with self._lock:
            return any(rule.body and re.search(rule.pattern, request.start) for rule in self._rules)

    def _rule_for(self, request: Request, body: bytes) -> Rule | None:
        with self._lock:
            for rule in self._rules:
                if re.search(rule.pattern, request.start) and re.search(rule.body.encode(), body):
                    rule.times -= 1
                    if rule.times <= 0:
                        self._rules.remove(rule)
                    return rule
        action = self.choose(request)
        return None if action is None else Rule("", action)

    def _exchange(self, client: socket.socket, request: Request, body: bytes, rule: Rule | None) -> None:
        action = None if rule is None else rule.action
        if action in KINDS:
            self._injected.note(KINDS[action], _route(request.start), "a request")
        if action == "drop":
            raise _Broken
        if action == "delay" and rule is not None:
            time.sleep(rule.seconds)
        if action == "hold" and rule is not None:
            rule.held.wait(request.token)
        if rule is not None and action in ("duplicate", "lose-answer", "truncate-answer", "hold-answer"):
            self._whole(client, request, body, rule)
            return
        with self._upstream() as server:
            server.sendall(request.head)
            half = request.length // 2
            stop = half if action in ("truncate", "hold-body") else request.length
            body = _pass_body(client, server, body, stop)
            if action == "truncate":
                raise _Broken
            if action == "hold-body" and rule is not None:
                rule.held.wait(request.token)
            _pass_body(client, server, body, request.length - stop)
            _pump(server, client)

    def _whole(self, client: socket.socket, request: Request, body: bytes, rule: Rule) -> None:
        """Send the whole request, twice at once if it is duplicated, and pass on all, half or nothing of the answer."""
        while len(body) < request.length:
            body += _receive(client)
        answers = []
        with ExitStack() as stack:
            servers = [stack.enter_context(self._upstream()) for _ in range(2 if rule.action == "duplicate" else 1)]
            for server in servers:
                server.sendall(request.head + body)
            for server in servers:
                answers.append(_read_all(server))
        if rule.action == "hold-answer":
            rule.held.wait(request.token)
        if rule.action in ("duplicate", "hold-answer"):
            client.sendall(answers[-1])
        elif rule.action == "truncate-answer":
            client.sendall(answers[0][: max(1, len(answers[0]) // 2)])

    def _upstream(self) -> socket.socket:
        """Return a connection to the next coordinator that accepts one. Raises _Broken if none does."""
        with self._lock:
            self._turn += 1
            ports = self.ports[self._turn % len(self.ports) :] + self.ports[: self._turn % len(self.ports)]
        for port in ports:
            with suppress(ConnectionError):
                server = socket.create_connection(("127.0.0.1", port), timeout=_SECONDS)
                self.served[port] = self.served.get(port, 0) + 1
                return server
        raise _Broken


def _read_head(client: socket.socket) -> tuple[Request, bytes]:
    data = b""
    while b"\r\n\r\n" not in data:
        if len(data) > _HEAD_BYTES:
            raise _Broken
        data += _receive(client)
    head, _, body = data.partition(b"\r\n\r\n")
    lines = head.split(b"\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(b":") for line in lines[1:])}
    length = int(headers.get(b"content-length", b"0"))
    token = headers.get(b"authorization", b"").removeprefix(b"Bearer ").decode("latin-1")
    kept = [line for line in lines if not line.lower().startswith((b"connection:", b"keep-alive:"))]
    start = lines[0].rpartition(b" ")[0].decode("latin-1")
    return Request(start, b"\r\n".join([*kept, b"Connection: close", b"", b""]), length, token), body


def _receive(connection: socket.socket) -> bytes:
    data = connection.recv(_CHUNK)
    if not data:
        raise _Broken
    return data


def _pass_body(client: socket.socket, server: socket.socket, body: bytes, num_bytes: int) -> bytes:
    """Pass on this many bytes of the body, and return the bytes that were read beyond them."""
    while len(body) < num_bytes:
        server.sendall(body)
        num_bytes -= len(body)
        body = _receive(client)
    server.sendall(body[:num_bytes])
    return body[num_bytes:]


def _pump(server: socket.socket, client: socket.socket) -> None:
    """Pass on the answer until either side closes, so that a killed worker's long poll ends."""
    while True:
        readable, _, _ = select.select([server, client], [], [], _SECONDS)
        if client in readable or not readable:
            raise _Broken  # a worker sends nothing more, so it has closed the connection
        data = server.recv(_CHUNK)
        if not data:
            return
        client.sendall(data)


def _read_all(server: socket.socket) -> bytes:
    parts = []
    while data := server.recv(_CHUNK):
        parts.append(data)
    return b"".join(parts)


def _route(start: str) -> str:
    """Return the request's start without a digest, such as `PUT /v1/artifacts/...`."""
    return re.sub(r"(/artifacts)/.*", r"\1/...", start)
