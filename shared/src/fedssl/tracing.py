"""OpenTelemetry traces of the services' processes only, and only if the standard OTEL_* variables ask for them.

A round is one trace. Its id is derived from the run and the round, so that every process that works on the round can
compute it, even after a crash. Within the trace, the calling span is passed on as `traceparent`, in HTTP headers and in
the headers of Celery's messages.
"""

import hashlib
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal
from uuid import UUID

from fedssl.errors import FedSSLError

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

TRACEPARENT = "traceparent"
Kind = Literal["internal", "server", "client", "consumer"]

_ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
_is_on = False


class TracingUnavailable(FedSSLError):
    """Traces were requested, but the package that sends them is not installed."""


def configure(service: str, exporter: "SpanExporter | None" = None) -> None:
    """Begin to trace this process as `service`, to `exporter` or, if a variable names one, to an OTLP endpoint.

    Call this once per process. Raises TracingUnavailable if the SDK is not installed.
    """
    global _is_on
    is_asked_for = any(os.environ.get(name) for name in _ENDPOINTS)
    if exporter is None and (not is_asked_for or os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true"):
        return
    try:
        from opentelemetry import trace
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor, SimpleSpanProcessor
    except ImportError:
        raise TracingUnavailable(
            f"OTEL_* asks for traces, and OpenTelemetry's SDK is missing: pip install '{service}[otel]'"
        ) from None
    # OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES take precedence over this name.
    name = os.environ.get("OTEL_SERVICE_NAME") or service
    provider = TracerProvider(resource=Resource.create({"service.name": name}))
    if exporter is not None:
        provider.add_span_processor(SimpleSpanProcessor(exporter))
    else:
        provider.add_span_processor(BatchSpanProcessor(_otlp(service)))
    trace.set_tracer_provider(provider)
    _is_on = True


def round_trace(run_id: UUID, round_number: int) -> dict[str, str]:
    """Return the headers of a round's trace, which are the same in every process."""
    digest = hashlib.sha256(f"{run_id}/{round_number}".encode()).hexdigest()
    return {TRACEPARENT: f"00-{digest[:32]}-{digest[32:48]}-01"}


def carried() -> dict[str, str]:
    """Return the headers that name the current span, or none if this process is not traced."""
    headers: dict[str, str] = {}
    if _is_on:
        from opentelemetry.propagate import inject

        inject(headers)
    return headers


@contextmanager
def span(
    name: str, parent: Mapping[str, str] | None = None, *, kind: Kind = "internal", **attributes: str | int | float
) -> Iterator[Any]:
    """Trace the block as one span, whose parent is the span in `parent`'s headers or, without them, the current one.

    Yields the span, or None if this process is not traced. An error that leaves the block is recorded in the span.
    """
    if not _is_on:
        yield None
        return
    from opentelemetry import trace
    from opentelemetry.propagate import extract

    context = extract(parent) if parent and TRACEPARENT in parent else None
    named = {f"fedssl.{key}": value for key, value in attributes.items()}
    tracer = trace.get_tracer("fedssl")
    with tracer.start_as_current_span(name, context, trace.SpanKind[kind.upper()], attributes=named) as current:
        yield current


@contextmanager
def round_span(
    name: str, run_id: UUID, round_number: int, kind: Kind = "internal", **attributes: str | int | float
) -> Iterator[Any]:
    """Trace the block as `span` does, at the top of the round's trace."""
    parent = round_trace(run_id, round_number)
    with span(name, parent, kind=kind, run=str(run_id), round=round_number, **attributes) as current:
        yield current


def _otlp(service: str) -> "SpanExporter":
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    except ImportError:
        raise TracingUnavailable(
            f"OTEL_* asks for traces, and the OTLP exporter is missing: pip install '{service}[otel]'"
        ) from None
    return OTLPSpanExporter()
