"""Prometheus metrics of one process of the coordinator. `health` adds what all processes share, from Postgres."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, start_http_server

from fedssl.engine.gpu_memory import gpu_bytes

REGISTRY = CollectorRegistry()
ProcessCollector(registry=REGISTRY)

_SECONDS = (0.005, 0.02, 0.1, 0.5, 2, 10, 60, 600, 3600)

REQUESTS = Counter("fedssl_requests", "Requests answered", ["method", "route", "status"], registry=REGISTRY)
REQUEST_SECONDS = Histogram(
    "fedssl_request_seconds",
    "Seconds from a request's first byte to its response's last",
    ["method", "route"],
    registry=REGISTRY,
    buckets=_SECONDS,
)
UPLOAD_BYTES = Counter("fedssl_upload_bytes", "Bytes of artifacts received and stored", registry=REGISTRY)
TASK_SECONDS = Histogram("fedssl_task_seconds", "Celery tasks", ["task"], registry=REGISTRY, buckets=_SECONDS)
TASK_FAILURES = Counter("fedssl_task_failures", "Computations that failed and are retried", ["task"], registry=REGISTRY)
NOTIFICATIONS = Counter(
    "fedssl_notification_tries", "Attempts to deliver a notification", ["kind", "outcome"], registry=REGISTRY
)
GPU_BYTES = Gauge("fedssl_gpu_memory_bytes", "GPU memory that this process holds", registry=REGISTRY)

GPU_BYTES.set_function(gpu_bytes)


def serve(host: str, port: int | None) -> None:
    """Serve the metrics on a separate port from a thread, unless `port` is None."""
    if port is not None:
        start_http_server(port, host, REGISTRY)
