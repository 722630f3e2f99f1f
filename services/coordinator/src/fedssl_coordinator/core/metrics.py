"""What each process of the coordinator counts of itself, for Prometheus. What all of them share is counted in Postgres:
see `health`."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, start_http_server

from fedssl.engine.gpu_memory import gpu_bytes

REGISTRY = CollectorRegistry()
ProcessCollector(registry=REGISTRY)

_SECONDS = (0.005, 0.02, 0.1, 0.5, 2, 10, 60, 600, 3600)

REQUESTS = Counter("fedssl_requests", "Requests answered", ["method", "route", "status"], registry=REGISTRY)
REQUEST_SECONDS = Histogram(
    "fedssl_request_seconds",
    "From a request's first byte to its answer's last",
    ["method", "route"],
    registry=REGISTRY,
    buckets=_SECONDS,
)
UPLOAD_BYTES = Counter("fedssl_upload_bytes", "Bytes of artifacts received and stored", registry=REGISTRY)
TASK_SECONDS = Histogram("fedssl_task_seconds", "Celery tasks", ["task"], registry=REGISTRY, buckets=_SECONDS)
TASK_FAILURES = Counter(
    "fedssl_task_failures", "Computations that failed, and are tried again", ["task"], registry=REGISTRY
)
GPU_BYTES = Gauge("fedssl_gpu_memory_bytes", "GPU memory that this process holds", registry=REGISTRY)

GPU_BYTES.set_function(gpu_bytes)


def serve(host: str, port: int | None) -> None:
    """Answer Prometheus on a port of its own, from a thread; None: do not."""
    if port is not None:
        start_http_server(port, host, REGISTRY)
