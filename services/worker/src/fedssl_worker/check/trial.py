"""Trains a few steps on a sample of the images, to estimate how long a round takes. Nothing is kept or sent."""

import dataclasses
import math
import time
from dataclasses import dataclass, field

import torch

from fedssl.artifacts.permission import permits_metric
from fedssl.cli.doctor.findings import Check, Found
from fedssl.cli.output import size
from fedssl.engine import LocalProgress, release_trainer, run_local_round, start_run
from fedssl.engine.devices import is_out_of_memory
from fedssl.errors import Cancelled, DataError, FedSSLError
from fedssl.methods import METHODS
from fedssl.methods.api import ClientData, Context, Metrics, Schedule
from fedssl.methods.site_data import wants_site_labels
from fedssl.protocol.methods.classifier import ClassifierConfig
from fedssl.protocol.methods.ridge_probe import RidgeProbeConfig
from fedssl.protocol.methods.site_labels import SiteLabelsConfig
from fedssl.protocol.runs import RunSpec
from fedssl.wording import plural
from fedssl_worker.check.outgoing import Outgoing
from fedssl_worker.check.own_data import sample_images
from fedssl_worker.data import PublicImages
from fedssl_worker.settings import Settings

NUM_STEPS = 20
MOST_SECONDS = 60.0
"""The time limit of a trial, because a step of a large encoder may take long on a CPU."""

_NUM_SAMPLED = 1_000
_CLIENT = "client"
_NAME = "training"


@dataclass(slots=True)
class TrialFound:
    """The check of the training, and the time that a whole round would take; None if it is not known."""

    checks: list[Check] = field(default_factory=list)
    seconds_per_round: float | None = None


class StepClock:
    """Records when steps were done. Between two records, nothing is built or warmed up."""

    def __init__(self, images_per_step: int) -> None:
        self._images_per_step = images_per_step
        self._start = time.monotonic()
        self._notes: list[tuple[float, LocalProgress]] = []

    def on_progress(self, progress: LocalProgress) -> None:
        """Record a step. Raises Cancelled once the time is up."""
        now = time.monotonic()
        self._notes.append((now, progress))
        if now - self._start > MOST_SECONDS and progress.step < progress.num_steps:
            raise Cancelled("the time for a trial is up")

    @property
    def num_steps(self) -> int:
        """The number of steps that were done."""
        return self._notes[-1][1].step if self._notes else 0

    @property
    def seconds_per_step(self) -> float:
        """The time per step between the first and the last record. If there is only one, all steps count."""
        (first_time, first), (last_time, last) = self._notes[0], self._notes[-1]
        if first.step == last.step:
            return self._images_per_step / last.images_per_second
        return (last_time - first_time) / (last.step - first.step)


def check_training(
    settings: Settings, spec: RunSpec, num_images: int, device: torch.device, outgoing: Outgoing | None
) -> TrialFound:
    """Train some steps as the run's method does, and estimate the time of one of its rounds."""
    if spec.method.distillation_epochs(0):
        return _not_tried("the coordinator trains before the first round, and no worker has those weights yet")
    if isinstance(spec.method, RidgeProbeConfig):
        return TrialFound([Check(_NAME, Found.NOTE, "the run's method takes no training steps")])
    try:
        public = PublicImages(device, settings.public_data).load(spec.public_data, spec.data)
    except DataError as error:
        return _not_tried(str(error))
    client_id = _CLIENT if outgoing is None or outgoing.policy is None else outgoing.policy.client
    wanted = spec.method.dimensions_wanted(spec.model)
    dimensions = None if wanted is None else tuple(range(wanted.width))
    ctx = Context(spec=spec, round_number=1, client_id=client_id, device=device, dimensions=dimensions, public=public)
    schedule = _schedule(num_images, ctx)
    if not schedule.num_epochs and spec.num_rounds > 1:  # Orchestra's first round only clusters
        ctx = dataclasses.replace(ctx, round_number=2)
        schedule = _schedule(num_images, ctx)
    try:
        metrics, clock = _train(settings, ctx)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        return _out_of_memory(spec, device)
    except FedSSLError as error:
        return TrialFound([Check(_NAME, Found.WRONG, str(error), "ask the run's operator to change the spec")])
    finally:
        release_trainer()
    if not clock.num_steps:
        return TrialFound([Check(_NAME, Found.NOTE, "a round of this run has no training steps")])
    return _timed(clock, schedule, device, [_numbers(spec, metrics, outgoing)] if metrics else [])


def _train(settings: Settings, ctx: Context) -> tuple[Metrics, StepClock]:
    """Train on a sample from random weights. Return the metrics, or none if the time was up, and the steps' clock."""
    spec = ctx.spec
    batch_size = spec.training.batch_size
    images = sample_images(settings.data, spec.data, max(batch_size, min(_NUM_SAMPLED, NUM_STEPS * batch_size)))
    pixels = torch.from_numpy(images.images).to(ctx.device)
    if (config := wants_site_labels(spec)) is None:
        labels = None if images.labels is None else torch.from_numpy(images.labels).to(ctx.device)
        data = ClientData(pixels, labels, groups=torch.arange(len(pixels)))  # groups do not change the time of a step
    else:
        data = _of_one_class(pixels, config)
    method = METHODS[spec.method.name]
    short = dataclasses.replace(ctx, spec=_shortened(spec, _schedule(len(data), ctx)))
    start = Context(spec=short.spec, round_number=0, device=ctx.device, public=ctx.public)
    broadcast = start_run(method, start).received
    clock = StepClock(min(batch_size, len(data)))
    try:
        return run_local_round(method, broadcast, None, data, short, clock.on_progress).metrics, clock
    except Cancelled:
        return {}, clock


def _of_one_class(pixels: torch.Tensor, config: SiteLabelsConfig) -> ClientData:
    """Return images that all have the first class and are all trained on: labels do not change the time of a step."""
    shape = (len(pixels), len(config.classes)) if config.multi_label else (len(pixels),)
    labels = torch.zeros(shape, dtype=torch.int64, device=pixels.device)
    held_out = torch.zeros(len(pixels), dtype=torch.bool, device=pixels.device)
    return ClientData(pixels, labels, held_out, torch.arange(len(pixels)))


def _schedule(num_images: int, ctx: Context) -> Schedule:
    return METHODS[ctx.spec.method.name].bind(ctx.spec).client.schedule(num_images, ctx)


def _shortened(spec: RunSpec, schedule: Schedule) -> RunSpec:
    """Return the spec with about NUM_STEPS steps in a round, from random weights."""
    values = spec.model_dump(mode="json")
    values["model"].pop("initial", None)
    if isinstance(spec.method, ClassifierConfig):
        values["method"]["start"] = None
    if schedule.num_epochs and schedule.steps_per_epoch:
        values["training"]["local_epochs"] = math.ceil(NUM_STEPS / schedule.steps_per_epoch)
    return RunSpec.model_validate(values)


def _timed(clock: StepClock, schedule: Schedule, device: torch.device, numbers: list[Check]) -> TrialFound:
    num_steps = schedule.num_epochs * schedule.steps_per_epoch
    held = ""
    if device.type == "cuda":
        held = f", {size(torch.cuda.max_memory_reserved(device))} of GPU memory"
    speed = f"{clock.seconds_per_step:.3g} s per step{held}"
    what = f"{plural(clock.num_steps, 'step')}, {speed}; a round has {plural(num_steps, 'step')}"
    return TrialFound([Check(_NAME, Found.OK, what), *numbers], num_steps * clock.seconds_per_step)


def _numbers(spec: RunSpec, metrics: Metrics, outgoing: Outgoing | None) -> Check:
    """Report which metrics a round sends, and which of them the policy withholds."""
    notice = None if outgoing is None else outgoing.notice
    names = sorted(metrics)
    withheld = [name for name in names if notice is not None and not permits_metric(notice, spec.method.name, name)]
    sent = [name for name in names if name not in withheld]
    what = f"a round sends {', '.join(sent) or 'none'}" + (f"; withheld: {', '.join(withheld)}" if withheld else "")
    return Check("metrics", Found.OK, what)


def _not_tried(why: str) -> TrialFound:
    return TrialFound([Check(_NAME, Found.NOTE, f"not tried: {why}", "nothing: a worker gets them when it joins")])


def _out_of_memory(spec: RunSpec, device: torch.device) -> TrialFound:
    what = f"out of memory on {device.type} with batch size {spec.training.batch_size}"
    todo = "ask for a lower training.batch_size or a smaller encoder, or use another device"
    return TrialFound([Check(_NAME, Found.WRONG, what, todo)])
