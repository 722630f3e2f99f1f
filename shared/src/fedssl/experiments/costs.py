"""The arithmetic cost of a run: multiply-adds of its encoder, and how often its images pass through it.

Only the encoder's passes count, and a backward pass counts as two forward ones; heads, losses, augmentation and
evaluation are left out. This is an estimate for choosing what to run: the papers' tables differ by factors of 1000.
"""

import functools
from dataclasses import dataclass

from fedssl.data.catalogue import KNOWN
from fedssl.models import build_encoder
from fedssl.models.complexity import num_multiply_adds
from fedssl.models.initialisation import on_meta_device
from fedssl.protocol.methods.add_ons import FedXConfig
from fedssl.protocol.methods.classifier import ClassifierConfig
from fedssl.protocol.methods.composed import ComposedConfig
from fedssl.protocol.methods.distillation import DistillationConfig
from fedssl.protocol.methods.fedca import FedCAConfig
from fedssl.protocol.methods.feddino import FedDINOConfig
from fedssl.protocol.methods.fedmoco import MomentumContrastConfig
from fedssl.protocol.methods.fedprotocl import FedProtoCLConfig
from fedssl.protocol.methods.orchestra import OrchestraConfig
from fedssl.protocol.model import EncoderConfig
from fedssl.protocol.runs import RunSpec

GPU_FLOPS = 190e12
"""The floating-point operations per second at which an H200 trained a ResNet-18 at 32 x 32 (docs/performance.md).

In bf16, with captured steps and batches of 512, FedSimCLR trained 28,700 images per second, and 41,600 with compiled
steps; smaller batches and float32 are slower. A machine's own speed is measured before anything is scaled to it.
"""


@dataclass(frozen=True, slots=True)
class Passes:
    """The number of times that an image of the batch passes an encoder, in all its views."""

    with_gradients: int
    without: int

    @property
    def units(self) -> int:
        """The cost in forward passes."""
        return 3 * self.with_gradients + self.without


def passes(method: ComposedConfig) -> Passes:
    """Return the passes of a training step, as the method's equations require them, without those of local crops.

    >>> from fedssl.protocol.methods.fedbyol import FedBYOLConfig
    >>> passes(FedBYOLConfig())
    Passes(with_gradients=2, without=2)
    """
    if isinstance(method, ClassifierConfig) and method.encoder_learning_rate is None:
        return Passes(0, 1)
    trained, frozen = (2 if "views" in method.traits else 1), 0  # MAE's one pass has only the visible patches
    if "target" in method.traits or isinstance(method, MomentumContrastConfig | FedDINOConfig):
        frozen += 2
    if isinstance(method, FedProtoCLConfig):
        frozen += 1  # the clusters of each epoch after the warm-up
    if isinstance(method, FedCAConfig) and method.alignment_weight:
        trained, frozen = trained + 1, frozen + 1  # public images, by the client's network and by the base model
    if isinstance(method, OrchestraConfig):
        trained, frozen = trained + 1, frozen + 1  # the rotated images; the target network
    for add_on in method.add_ons:
        if isinstance(add_on, FedXConfig):
            if add_on.local_relational or add_on.global_relational:
                trained += 1  # the random images
            frozen += bool(add_on.global_contrastive) + bool(add_on.global_relational)  # the teacher
    return Passes(trained, frozen)


@functools.cache
def multiply_adds(encoder: EncoderConfig, channels: int, image_size: int, crop_size: int | None = None) -> int:
    """Return the multiply-adds of the forward pass of one image, or of one crop of it."""
    with on_meta_device():
        network = build_encoder(encoder, channels, image_size)
    size = crop_size or image_size
    return num_multiply_adds(network, (channels, size, size))


def num_images(spec: RunSpec, public_client: str | None = None) -> float | None:
    """Return the number of images that all clients hold together; None if the data set is not a known one."""
    partition = spec.partition
    if partition is None or partition.dataset not in KNOWN:
        return None
    pool = KNOWN[partition.dataset].num_train * (1 - partition.hold_out)
    total = min(pool, partition.max_images or pool)
    held = partition.share * total
    return held * (1 - 1 / partition.num_clients) if public_client is not None else held


def trained_images(spec: RunSpec, public_client: str | None) -> float | None:
    """Return the number of images that all clients train on in all rounds, counting repetitions.

    It includes the images of incomplete batches that are dropped. None if the data set is not a known one.
    """
    held = num_images(spec, public_client)
    return None if held is None else held * spec.cohort.fraction * spec.num_rounds * spec.training.num_epochs


def server_images(spec: RunSpec) -> float:
    """Return the number of public images that the coordinator trains on in all rounds.

    It is scaled to the cost of an image that passes twice with gradients.
    """
    method, public = spec.method, spec.public_data
    if public is None:
        return 0.0
    if isinstance(method.reducer, DistillationConfig):  # one trained view, one for the momentum encoder
        return spec.num_rounds * method.reducer.num_epochs * public.num_images * Passes(1, 1).units / Passes(2, 0).units
    if isinstance(method, FedCAConfig) and method.alignment_weight:
        return float(method.num_base_epochs * public.num_images)
    return 0.0


def flops(spec: RunSpec, public_client: str | None) -> float | None:
    """Return the floating-point operations of a whole run whose encoder's weights are all trained.

    Returns None if the data set is not a known one.
    """
    trained = trained_images(spec, public_client)
    if trained is None:
        return None
    shape = (spec.model.encoder, spec.data.channels, spec.data.image_size)
    views = multiply_adds(*shape) * (trained * passes(spec.method).units + server_images(spec) * Passes(2, 0).units)
    if (crops := spec.data.local_crops) is None:
        return 2 * views
    return 2 * (views + trained * multiply_adds(*shape, crops.image_size) * Passes(crops.num_crops, 0).units)
