"""How fast this machine trains and judges, measured in a few seconds on images of noise."""

import contextlib
import time

import torch

from fedssl.data import ImageData
from fedssl.dimensions import client_dimensions
from fedssl.engine import LocalProgress, run_local_round, start_run
from fedssl.errors import Cancelled
from fedssl.experiments.overlays import Values, overlay
from fedssl.judging import Labelled, judge
from fedssl.methods import METHODS
from fedssl.methods.api import ClientData, Context
from fedssl.models import build_encoder, initialised
from fedssl.protocol.methods.fedca import FedCAConfig
from fedssl.protocol.runs import RunSpec
from fedssl.shards import client_names

SECONDS = 1.5
_MAX_IMAGES, _MAX_PUBLIC = 2048, 256
_CPU_BATCH = 16  # of ResNets, whose steps would last longer than the measurement


def training_speed(spec: RunSpec, device: str = "cpu", seconds: float = SECONDS) -> float:
    """Images a second of this spec's local training, views and all, as the engine trains it."""
    spec = _quick(spec, device)
    generator = torch.Generator().manual_seed(0)
    shape = (spec.data.channels, spec.data.image_size, spec.data.image_size)
    count = min(_MAX_IMAGES, 4 * spec.training.batch_size)
    images = torch.randint(0, 256, (count, *shape), dtype=torch.uint8, generator=generator)
    data = ClientData(images.to(device), torch.randint(0, 10, (count,), generator=generator).to(device))
    public = None if spec.public_data is None else ClientData(images[:_MAX_PUBLIC].to(device))
    names = client_names(spec.partition.num_clients if spec.partition is not None else 1)
    ctx = Context(
        spec=spec,
        round_number=spec.num_rounds,  # past every warm-up
        client_id=names[0],
        device=torch.device(device),
        dimensions=client_dimensions(spec, names).get(names[0]),
        public=public,
    )
    method = METHODS[spec.method.name]
    broadcast = start_run(method, Context(spec=spec, round_number=0, device=ctx.device, public=public)).broadcast
    started, speeds = time.monotonic(), [0.0]

    def stop(progress: LocalProgress) -> None:
        speeds.append(progress.images_per_second)
        if time.monotonic() - started >= seconds:
            raise Cancelled("measured")

    with contextlib.suppress(Cancelled):
        run_local_round(method, broadcast, None, data, ctx, stop)
    return max(speeds)


def judging_seconds(spec: RunSpec, labelled: Labelled, device: str = "cpu") -> float:
    """How long judging an encoder as the spec says takes."""
    assert spec.evaluation is not None, "asked for specs that judge"
    encoder = initialised(lambda: build_encoder(spec.model.encoder, spec.data.channels), 0)
    started = time.monotonic()
    judge(encoder, labelled, spec.evaluation, spec.data, device=device)
    return time.monotonic() - started


def noise(spec: RunSpec, num_train: int, num_test: int, num_classes: int) -> Labelled:
    """Labelled images of noise in a spec's shape, where only time is of interest."""
    generator = torch.Generator().manual_seed(0)
    shape = (spec.data.channels, spec.data.image_size, spec.data.image_size)

    def draw(count: int) -> ImageData:
        images = torch.randint(0, 256, (count, *shape), dtype=torch.uint8, generator=generator)
        return ImageData(images.numpy(), torch.randint(0, num_classes, (count,), generator=generator).numpy())

    return Labelled(draw(num_train), draw(num_test))


def _quick(spec: RunSpec, device: str) -> RunSpec:
    """The same step, with nothing expensive before it and no end before the measurement's."""
    values: Values = {"training": {"local_epochs": 10_000}}
    if isinstance(spec.method, FedCAConfig):
        values["method"] = {"num_base_epochs": 1}
    if device == "cpu" and spec.model.encoder.name != "convnet":
        values["training"]["batch_size"] = min(spec.training.batch_size, _CPU_BATCH)
    return RunSpec.model_validate(overlay(spec.model_dump(mode="json"), values))
