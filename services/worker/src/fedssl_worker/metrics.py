"""The worker's metrics for Prometheus, which are served only if `--metrics-port` is set."""

import time

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, start_http_server

from fedssl.engine.gpu_memory import gpu_bytes
from fedssl.protocol.work import Progress
from fedssl_worker.settings import SettingsError

REGISTRY = CollectorRegistry()
ProcessCollector(registry=REGISTRY)

ASSIGNMENTS = Counter("fedssl_worker_assignments", "Assignments by how they ended here", ["outcome"], registry=REGISTRY)
UPLOAD_BYTES = Counter("fedssl_worker_upload_bytes", "Bytes of updates that were sent", registry=REGISTRY)
UNANSWERED = Counter("fedssl_worker_unanswered", "How often the coordinator did not answer", registry=REGISTRY)
TRAINING_SECONDS = Histogram(
    "fedssl_worker_training_seconds",
    "From a claim to the trained update",
    registry=REGISTRY,
    buckets=(1, 5, 20, 60, 300, 1800, 7200, 28800),
)
STEP_SECONDS = Histogram(
    "fedssl_worker_step_seconds",
    "One step of the optimiser, as a mean between two progress reports",
    registry=REGISTRY,
    buckets=(0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10),
)
GPU_BYTES = Gauge("fedssl_worker_gpu_memory_bytes", "GPU memory that this process holds", registry=REGISTRY)
GPU_BYTES.set_function(gpu_bytes)


class StepTimer:
    """Measures the time per training step from one assignment's progress."""

    def __init__(self) -> None:
        self._before: tuple[int, float] | None = None

    def observe(self, progress: Progress) -> None:
        """Record the mean time per step since the last progress."""
        if progress.phase != "training":
            return
        now = time.perf_counter()
        if self._before is not None and progress.step > self._before[0]:
            STEP_SECONDS.observe((now - self._before[1]) / (progress.step - self._before[0]))
        self._before = (progress.step, now)


def serve(host: str, port: int | None) -> None:
    """Serve the metrics from a thread if there is a port. Raises SettingsError if the port is unavailable."""
    if port is None:
        return
    try:
        start_http_server(port, host, REGISTRY)
    except OSError as error:
        raise SettingsError(
            f"cannot serve metrics at {host}, port {port} ({error.strerror}): choose another --metrics-port or "
            "--metrics-host"
        ) from None
