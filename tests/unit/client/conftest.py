"""A real HTTP server on the loopback interface, whose answers a test defines."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from pydantic import BaseModel

from support.listening import LoopbackServer, QuietHandler


@dataclass
class Received:
    """A request as the server received it."""

    method: str
    path: str
    query: dict[str, str]
    headers: dict[str, str]
    body: bytes


@dataclass
class Answer:
    """An answer to send. If `cut_after` is set, the connection is broken after this many bytes of the body.

    `pause_seconds` is the pause after every line of the body.
    """

    status: int = 200
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)
    cut_after: int | None = None
    with_length: bool = True
    pause_seconds: float = 0.0


Script = Callable[[Received], Answer]


def json_answer(model: BaseModel | dict[str, Any], status: int = 200, **headers: str) -> Answer:
    text = model.model_dump_json() if isinstance(model, BaseModel) else json.dumps(model)
    return Answer(status, text.encode(), {"Content-Type": "application/json", **headers})


def problem(slug: str, status: int, detail: str = "Do something else.", **headers: str) -> Answer:
    body = {"type": f"urn:fedssl:problem:{slug}", "title": slug, "status": status, "detail": detail}
    return Answer(status, json.dumps(body).encode(), {"Content-Type": "application/problem+json", **headers})


class ScriptedServer(LoopbackServer):
    """Answers with `script`, and records the requests."""

    def __init__(self) -> None:
        super().__init__(_Handler)
        self.script: Script = lambda request: Answer(500)
        self.requests: list[Received] = []


class _Handler(QuietHandler):
    protocol_version = "HTTP/1.1"

    def _answer(self) -> None:
        server = self.server
        assert isinstance(server, ScriptedServer)
        parts = urlsplit(self.path)
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        query = {name: values[0] for name, values in parse_qs(parts.query).items()}
        request = Received(self.command, parts.path, query, dict(self.headers), body)
        server.requests.append(request)
        answer = server.script(request)
        with suppress(ConnectionError):  # the client closed the connection early
            self._send(answer)

    def _send(self, answer: Answer) -> None:
        self.send_response(answer.status)
        for name, value in answer.headers.items():
            self.send_header(name, value)
        if answer.with_length:
            self.send_header("Content-Length", str(len(answer.body)))
        else:
            self.send_header("Connection", "close")
            self.close_connection = True
        self.end_headers()
        body = answer.body if answer.cut_after is None else answer.body[: answer.cut_after]
        for part in body.splitlines(keepends=True) if answer.pause_seconds else [body]:
            self.wfile.write(part)
            time.sleep(answer.pause_seconds)
        self.close_connection |= answer.cut_after is not None

    do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = _answer  # noqa: N815 - http.server calls these names


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with ScriptedServer() as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        yield server
        server.shutdown()
