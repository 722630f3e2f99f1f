"""What a run costs in arithmetic: multiply-adds of its encoder, and how often its images pass through it.

Counted are the encoder's passes alone, a backward pass as two forward ones; heads, losses, augmentation and judging
are left out. It is an estimate for choosing what to run, and the papers' tables differ by factors of 1000.
"""

import functools
from dataclasses import dataclass

import torch

from fedssl.data.catalogue import KNOWN
from fedssl.models import build_encoder
from fedssl.models.complexity import num_multiply_adds
from fedssl.protocol.methods.add_ons import FedXConfig
from fedssl.protocol.methods.composed import ComposedConfig
from fedssl.protocol.methods.distillation import DistillationConfig
from fedssl.protocol.methods.fedca import FedCAConfig
from fedssl.protocol.methods.fedmoco import MomentumContrastConfig
from fedssl.protocol.methods.orchestra import OrchestraConfig
from fedssl.protocol.model import EncoderConfig
from fedssl.protocol.runs import RunSpec

GPU_FLOPS = 67e12
"""Floating-point operations a second that an H200 is taken to sustain on a ResNet-18 at 32 x 32 in bf16, about 20,000
images a second of training. An assumption: a machine's own speed is measured before anything is scaled to it."""


@dataclass(frozen=True, slots=True)
class Passes:
    """How often an image of the batch, its views and streams together, passes an encoder."""

    with_gradients: int
    without: int

    @property
    def units(self) -> int:
        """In forward passes."""
        return 3 * self.with_gradients + self.without


def passes(method: ComposedConfig) -> Passes:
    """A training step's passes, as the methods' equations need them.

    >>> from fedssl.protocol.methods.fedbyol import FedBYOLConfig
    >>> passes(FedBYOLConfig())
    Passes(with_gradients=2, without=2)
    """
    trained, frozen = (1 if "labels" in method.traits else 2), 0
    if "target" in method.traits or isinstance(method, MomentumContrastConfig):
        frozen += 2
    if isinstance(method, FedCAConfig) and method.alignment_weight:
        trained, frozen = trained + 1, frozen + 1  # public images, by the client's network and by the base model
    if isinstance(method, OrchestraConfig):
        trained, frozen = trained + 1, frozen + 1  # the turned images; the target network
    for add_on in method.add_ons:
        if isinstance(add_on, FedXConfig):
            if add_on.local_relational or add_on.global_relational:
                trained += 1  # the random images
            if add_on.global_contrastive or add_on.global_relational:
                frozen += 2  # the teacher
    return Passes(trained, frozen)


@functools.cache
def multiply_adds(encoder: EncoderConfig, channels: int, image_size: int) -> int:
    """Of one image's forward pass."""
    with torch.device("meta"):  # shapes are enough: nothing is drawn or computed
        network = build_encoder(encoder, channels)
    return num_multiply_adds(network, (channels, image_size, image_size))


def num_images(spec: RunSpec, public_client: str | None = None) -> float | None:
    """Images that the clients hold together; None where the data set is not known here."""
    partition = spec.partition
    if partition is None or partition.dataset not in KNOWN:
        return None
    total = min(KNOWN[partition.dataset].num_train, partition.max_images or KNOWN[partition.dataset].num_train)
    held = partition.share * total
    return held * (1 - 1 / partition.num_clients) if public_client is not None else held


def trained_images(spec: RunSpec, public_client: str | None = None) -> float | None:
    """Images trained on by all clients in all rounds, each as often as it is, before incomplete batches are dropped."""
    held = num_images(spec, public_client)
    return None if held is None else held * spec.cohort.fraction * spec.num_rounds * spec.training.local_epochs


def server_images(spec: RunSpec) -> float:
    """Public images trained on by the coordinator in all rounds, in the same unit: passes of a plain method's image."""
    method, public = spec.method, spec.public_data
    if public is None:
        return 0.0
    if isinstance(method.reducer, DistillationConfig):  # one trained view, one for the momentum encoder
        return spec.num_rounds * method.reducer.num_epochs * public.num_images * Passes(1, 1).units / Passes(2, 0).units
    if isinstance(method, FedCAConfig) and method.alignment_weight:
        return float(method.num_base_epochs * public.num_images)
    return 0.0


def flops(spec: RunSpec, public_client: str | None = None) -> float | None:
    """Floating-point operations of a whole run; None where the data set is not known here."""
    trained = trained_images(spec, public_client)
    if trained is None:
        return None
    each = 2 * multiply_adds(spec.model.encoder, spec.data.channels, spec.data.image_size)
    return each * (trained * passes(spec.method).units + server_images(spec) * Passes(2, 0).units)
