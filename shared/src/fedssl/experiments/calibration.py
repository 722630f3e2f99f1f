"""Measure how fast this machine trains and evaluates, in a few seconds on images of noise."""

import contextlib
import time

import torch

from fedssl.data import ImageData
from fedssl.data.batches import num_batches, num_trained
from fedssl.data.partitioning import client_names
from fedssl.dimensions import client_dimensions
from fedssl.engine import LocalProgress, run_local_round, start_run
from fedssl.errors import Cancelled
from fedssl.evaluation.suite import Labelled, evaluate_encoder
from fedssl.experiments.overlays import Values, changed
from fedssl.methods import METHODS
from fedssl.methods.api import ClientData, Context
from fedssl.models import build_encoder, initialised
from fedssl.protocol.methods.fedca import FedCAConfig
from fedssl.protocol.runs import RunSpec

SECONDS = 1.5
_MAX_IMAGES, _MAX_PUBLIC = 2048, 256
_NUM_WARM = 10  # the number of warm-up steps on a GPU
_CPU_BATCH = 16  # the batch size of ResNets, whose steps would otherwise take longer than the measurement


def training_speed(spec: RunSpec, device: str = "cpu", seconds: float = SECONDS) -> float:
    """Return images per second of this spec's local training in the engine, including the computation of views."""
    spec = _quick(spec, device)
    generator = torch.Generator().manual_seed(0)
    shape = (spec.data.channels, spec.data.image_size, spec.data.image_size)
    count = min(_MAX_IMAGES, 4 * spec.training.batch_size)
    images = torch.randint(0, 256, (count, *shape), dtype=torch.uint8, generator=generator)
    labels = torch.randint(0, 10, (count,), generator=generator)
    data = ClientData(images.to(device), labels.to(device), groups=torch.arange(count))
    public = None if spec.public_data is None else ClientData(images[:_MAX_PUBLIC].to(device))
    names = client_names(spec.partition.num_clients if spec.partition is not None else 1)
    ctx = Context(
        spec=spec,
        round_number=spec.num_rounds,  # later than every warm-up
        client_id=names[0],
        device=torch.device(device),
        dimensions=client_dimensions(spec, names).get(names[0]),
        public=public,
    )
    method = METHODS[spec.method.name]
    broadcast = start_run(method, Context(spec=spec, round_number=0, device=ctx.device, public=public)).received
    cut = (count, spec.training.batch_size, spec.training.drop_last)
    watch = _Stopwatch(seconds, num_trained(*cut) / num_batches(*cut), 0 if device == "cpu" else _NUM_WARM)
    with contextlib.suppress(Cancelled):
        run_local_round(method, broadcast, None, data, ctx, watch)
    return watch.speed


class _Stopwatch:
    """Ends a round after measuring it for some seconds. `speed` is its images per second.

    The first `num_warm` steps do not count: on a GPU, libraries choose their kernels in them, and one step is captured
    as a CUDA graph.
    """

    def __init__(self, seconds: float, images_per_step: float, num_warm: int) -> None:
        self.speed = 0.0
        self._seconds, self._images_per_step, self._num_warm = seconds, images_per_step, num_warm
        self._start: tuple[float, int] | None = None if num_warm else (time.monotonic(), 0)

    def __call__(self, progress: LocalProgress) -> None:
        now = time.monotonic()
        if self._start is None:
            if progress.step >= self._num_warm:
                self._start = now, progress.step
            return
        since, step = self._start
        measured = (progress.step - step) * self._images_per_step / max(now - since, 1e-9)
        self.speed = max(self.speed, measured if step else progress.images_per_second)
        if now - since >= self._seconds:
            raise Cancelled("measured")


def judging_seconds(spec: RunSpec, labelled: Labelled, device: str) -> float:
    """Return the seconds that the spec's evaluation of an encoder takes."""
    assert spec.central_evaluation is not None, "only called for specs with an evaluation"
    data = spec.data
    encoder = initialised(lambda: build_encoder(spec.model.encoder, data.channels, data.image_size), 0)
    started = time.monotonic()
    evaluate_encoder(encoder, labelled, spec.central_evaluation, spec.data, device=device)
    return time.monotonic() - started


def noise(spec: RunSpec, num_train: int, num_test: int, num_classes: int) -> Labelled:
    """Return labelled images of noise in a spec's shape, for measuring time."""
    generator = torch.Generator().manual_seed(0)
    shape = (spec.data.channels, spec.data.image_size, spec.data.image_size)

    def draw(count: int) -> ImageData:
        images = torch.randint(0, 256, (count, *shape), dtype=torch.uint8, generator=generator)
        return ImageData(images.numpy(), torch.randint(0, num_classes, (count,), generator=generator).numpy())

    return Labelled(draw(num_train), draw(num_test))


def _quick(spec: RunSpec, device: str) -> RunSpec:
    """Return a spec with the same step and nothing expensive before it, which lasts longer than the measurement."""
    # Compilation would take longer than the measurement, and pays off only in a long run.
    # The speed does not depend on the weights, which may be registered with a coordinator only.
    # The images are noise in memory.
    values: Values = {
        "training": {
            "local_epochs": 10_000,
            "gpu_steps": "eager" if spec.training.gpu_steps == "eager" else "recorded",
        },
        "model": {"initial": None},
        "data": {"cache_size": None},
    }
    if isinstance(spec.method, FedCAConfig):
        values["method"] = {"num_base_epochs": 1}
    if device == "cpu" and spec.model.encoder.name != "convnet":
        values["training"]["batch_size"] = min(spec.training.batch_size, _CPU_BATCH)
    return changed(spec, values)
