"""A receiver for OpenTelemetry's own protocol: protobuf over HTTP, as a collector receives it."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.trace.v1.trace_pb2 import Span

_MOST_BYTES = 10_000_000


@dataclass(frozen=True, slots=True)
class Received:
    """One span. Its ids are hexadecimal, and `parent` is empty for the root."""

    service: str
    name: str
    kind: str
    trace: str
    id: str
    parent: str


class Receiver:
    """Stores every span that it receives."""

    def __init__(self) -> None:
        self.spans: list[Received] = []
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                assert self.path == "/v1/traces"
                assert self.headers["Content-Type"] == "application/x-protobuf"
                receiver._keep(self.rfile.read(min(int(self.headers["Content-Length"]), _MOST_BYTES)))
                self.send_response(200)
                self.send_header("Content-Type", "application/x-protobuf")
                self.end_headers()
                self.wfile.write(ExportTraceServiceResponse().SerializeToString())

            def log_message(self, *_: object) -> None:
                """Print nothing, to keep the tests' output clean."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def _keep(self, body: bytes) -> None:
        for process in ExportTraceServiceRequest.FromString(body).resource_spans:
            about = {entry.key: entry.value.string_value for entry in process.resource.attributes}
            self.spans += [
                Received(
                    about["service.name"], span.name, Span.SpanKind.Name(span.kind).removeprefix("SPAN_KIND_").lower(),
                    span.trace_id.hex(), span.span_id.hex(), span.parent_span_id.hex(),
                )
                for part in process.scope_spans for span in part.spans
            ]  # fmt: skip

    @contextmanager
    def running(self) -> Iterator["Receiver"]:
        thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield self
        finally:
            self._server.shutdown()
            thread.join()
            self._server.server_close()
