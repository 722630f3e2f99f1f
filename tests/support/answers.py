"""A real HTTP server on loopback that records its requests and gives prepared answers."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from support.listening import LoopbackServer, QuietHandler


class Answers(LoopbackServer):
    """A server that answers with the JSON of `known`, by method and path, or with 404.

    `date` replaces the Date header if it is not None.
    """

    def __init__(self, known: dict[tuple[str, str], Any]) -> None:
        super().__init__(_Handler)
        self.known = known
        self.asked: list[tuple[str, str]] = []
        self.date: str | None = None


class _Handler(QuietHandler):
    def _answer(self) -> None:
        server = self.server
        assert isinstance(server, Answers)
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        what = (self.command, self.path.partition("?")[0])
        server.asked.append(what)
        problem = {"type": "urn:fedssl:problem:not-found", "title": "x", "status": 404, "detail": "nothing here"}
        body = json.dumps(server.known.get(what, problem)).encode()
        self.send_response_only(200 if what in server.known else 404)
        self.send_header("Date", server.date or self.date_time_string())
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = _answer  # noqa: N815 - http.server calls these names


@contextmanager
def answering(known: dict[tuple[str, str], Any]) -> Iterator[Answers]:
    """Yield the server, which runs for the length of the block."""
    with Answers(known) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        yield server
        server.shutdown()
