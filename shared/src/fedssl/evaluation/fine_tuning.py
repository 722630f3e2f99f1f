"""Semi-supervised evaluation: the encoder and a new classifier are trained on a few labelled images."""

import copy
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final, Literal

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from fedssl import optimizers
from fedssl.data import AUGMENTATIONS, ImageData, epoch_batches, normalize, random_view, to_float
from fedssl.data.partitions import stratified_share
from fedssl.errors import DataError
from fedssl.evaluation.features import extract_features, labels_of, require_finite
from fedssl.precision import exact_float32, exact_layout
from fedssl.protocol.data import AugmentationConfig, DataConfig

Selection = Literal["stratified", "first"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FineTuneSettings:
    """How the network is fine-tuned.

    Attributes:
        selection: which images keep their labels, see :func:`labelled_share`.
        optimizer: used with `momentum` (SGD only) and `weight_decay`.
        encoder_learning_rate: with None the encoder's weights are not changed.
        head_learning_rate: the learning rate of the classifier.
        schedule: `cosine` decreases both learning rates to 0, epoch by epoch.
        hidden_dim: None for a linear classifier, else the width of one hidden layer with BatchNorm and ReLU.
        batch_size, epochs: over the labelled images; a last incomplete batch is used, unless it is a single image.
        batch_norm_epochs: epochs in which BatchNorm normalises with the batch and its statistics follow the images,
            whether or not the encoder's weights do; afterwards the network trains in eval mode. None means all epochs.
        evaluate_every: epochs between two tests; the last epoch is always tested.
        augmentation: how training images are augmented; with None they are not.
        aspect: the smallest and the largest aspect ratio of the augmentation's crops.
        seed: the seed of the classifier's first weights, of the order and of the views.
    """

    selection: Selection = "stratified"
    optimizer: Literal["sgd", "adam"] = "sgd"
    encoder_learning_rate: float | None = 1e-3
    head_learning_rate: float = 0.3
    schedule: Literal["constant", "cosine"] = "constant"
    momentum: float = 0.9
    weight_decay: float = 0.0
    hidden_dim: int | None = None
    batch_size: int = 128
    epochs: int = 200
    batch_norm_epochs: int | None = None
    evaluate_every: int = 50
    augmentation: AugmentationConfig | None = None
    aspect: tuple[float, float] = (3 / 4, 4 / 3)
    seed: int = 0


@dataclass(frozen=True, slots=True)
class FineTuneResult:
    """The accuracies of a fine-tuned network, as shares of the test set, 0..1.

    Attributes:
        accuracy: after the last epoch.
        best_accuracy: the best of the tests, chosen on the test set as in some papers. Report it only next to the
            last.
        best_epoch: the first epoch that reached it, counted from 1.
        num_tests: the number of tests among which it is the best.
        num_epochs, num_labelled: the numbers of epochs and of labelled images.
    """

    accuracy: float
    best_accuracy: float
    best_epoch: int
    num_tests: int
    num_epochs: int
    num_labelled: int

    @property
    def chosen(self) -> str:
        """A sentence that describes how `best_accuracy` was chosen."""
        if self.best_epoch == self.num_epochs:
            return "the last is the best"
        return (
            f"last: epoch {self.num_epochs}; best: epoch {self.best_epoch} of {self.num_tests} tested, "
            "chosen on the test set"
        )


_CROP_AND_FLIP = AugmentationConfig(min_scale=0.64, jitter=0, greyscale=0, flip=0.5)

_SSD = FineTuneSettings(augmentation=_CROP_AND_FLIP, aspect=(1.0, 1.0))
# FedU states the whole network and 100 epochs, and FedRLC also Adam and 0.001; the rest is as in EasyFL, FedU's code.
_FEDU = FineTuneSettings(
    optimizer="adam", encoder_learning_rate=1e-3, head_learning_rate=1e-3, hidden_dim=4096, epochs=100, evaluate_every=1
)

FINE_TUNINGS: Final = MappingProxyType(
    {
        # A quarter of SSD's epochs; the encoder's learning rate adds up to about the same.
        "fast": replace(_SSD, encoder_learning_rate=7e-3, schedule="cosine", epochs=50),
        "ssd": _SSD,
        # FedX states SGD, 0.001 and 100 epochs; the rest is as in its training.
        "fedx": FineTuneSettings(
            head_learning_rate=1e-3, weight_decay=1e-5, epochs=100, evaluate_every=10,
            augmentation=AUGMENTATIONS["fedx-cifar10"],
        ),
        "fedu": _FEDU,
        # EasyFL's code trains only the classifier, and its first test leaves the network in eval mode permanently.
        "fedu-reference": replace(_FEDU, selection="first", encoder_learning_rate=None, batch_norm_epochs=1),
        "fedrlc": _FEDU,
    }
)  # fmt: skip
"""Settings by the paper that they come from; `-reference` if its code does something else. FLESD has no settings."""


def labelled_share(
    labels: NDArray[np.int64], share: float, seed: int, rule: Selection = "stratified"
) -> NDArray[np.int64]:
    """Return the sorted indices of the images that keep their labels.

    Args:
        labels: class numbers (N,).
        share: the share of the images, in (0, 1].
        seed: the seed of the choice.
        rule: `stratified` takes the share of each class at random, at least one image; `first` takes the first images
            of the set, as EasyFL does.
    """
    if not 0 < share <= 1:
        raise ValueError(f"share must lie in (0, 1], got {share}")
    if rule == "first":
        return np.arange(max(1, int(share * len(labels))), dtype=np.int64)
    return stratified_share(labels, share, seed)


def semi_supervised(
    encoder: nn.Module,
    train: ImageData,
    test: ImageData,
    config: DataConfig,
    share: float,
    *,
    settings: FineTuneSettings = FINE_TUNINGS["fast"],
    device: torch.device | str = "cpu",
    on_progress: Callable[[float], None] = lambda share: None,
) -> FineTuneResult:
    """Call :func:`fine_tune` on a share of the training images, chosen by the rule and the seed of the settings."""
    chosen = labelled_share(labels_of(train).numpy(), share, settings.seed, settings.selection)
    few = train.subset(chosen)
    return fine_tune(encoder, few, test, config, settings=settings, device=device, on_progress=on_progress)


def fine_tune(
    encoder: nn.Module,
    train: ImageData,
    test: ImageData,
    config: DataConfig,
    *,
    settings: FineTuneSettings = FINE_TUNINGS["fast"],
    device: torch.device | str = "cpu",
    on_progress: Callable[[float], None] = lambda share: None,
) -> FineTuneResult:
    """Train a copy of the encoder with a classifier on the labelled images, and test it.

    Args:
        encoder: from images to (B, H); it is not changed.
        train: the labelled images; :func:`labelled_share` chooses them.
        test: the labelled test set.
        config: shape and normalisation of the images.
        settings: one of :data:`FINE_TUNINGS`, or your own.
        device: where everything is computed.
        on_progress: called after every epoch with the share that is done.

    Raises:
        DataError: a set has no labels or no images, or not the shape of `config`.
        ValueError: the encoder's features are not finite.
    """
    if train.labels is None or test.labels is None or not len(train) or not len(test):
        raise DataError("fine-tuning needs labelled images to train on and to test with")
    num_classes = int(max(train.labels.max(), test.labels.max())) + 1
    encoder = copy.deepcopy(encoder).to(device, memory_format=exact_layout(device))  # type: ignore[call-overload]
    features_1H = extract_features(encoder, train.subset(np.arange(1)), config, device)
    require_finite(features_1H)
    head = _head(features_1H.shape[1], num_classes, settings).to(device)
    accuracies: dict[int, float] = {}
    with exact_float32(device):
        for epoch in _epochs(encoder, head, train, config, settings, device):
            if epoch % settings.evaluate_every == 0 or epoch == settings.epochs:
                accuracies[epoch] = _accuracy(head, extract_features(encoder, test, config, device), labels_of(test))
            on_progress(epoch / settings.epochs)
    best = max(accuracies.values(), key=lambda accuracy: (not math.isnan(accuracy), accuracy))
    return FineTuneResult(
        accuracy=accuracies[settings.epochs],
        best_accuracy=best,
        best_epoch=next(epoch for epoch, accuracy in accuracies.items() if accuracy is best),
        num_tests=len(accuracies),
        num_epochs=settings.epochs,
        num_labelled=len(train),
    )


def _head(width: int, num_classes: int, settings: FineTuneSettings) -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(settings.seed)
        if settings.hidden_dim is None:
            return nn.Sequential(nn.Linear(width, num_classes))
        hidden = nn.Linear(width, settings.hidden_dim)
        norm = nn.BatchNorm1d(settings.hidden_dim)
        return nn.Sequential(hidden, norm, nn.ReLU(), nn.Linear(settings.hidden_dim, num_classes))


def _epochs(
    encoder: nn.Module,
    head: nn.Module,
    train: ImageData,
    config: DataConfig,
    settings: FineTuneSettings,
    device: torch.device | str,
) -> Iterator[int]:
    """Train one epoch per item, and yield its number, counted from 1."""
    generator = torch.Generator().manual_seed(settings.seed)
    optimizer = _optimizer(encoder, head, settings)
    rates = [float(group["lr"]) for group in optimizer.param_groups]
    tuned, labels = settings.encoder_learning_rate is not None, labels_of(train).to(device)
    for epoch in range(settings.epochs):
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * _decay(epoch, settings)
        learning = settings.batch_norm_epochs is None or epoch < settings.batch_norm_epochs
        encoder.train(learning)
        head.train(learning)
        for rows in epoch_batches(len(train), settings.batch_size, generator, drop_last=False):
            x_BCHW = to_float(torch.tensor(train.images[rows.numpy()]).to(device))
            if settings.augmentation is not None:
                x_BCHW = random_view(x_BCHW, settings.augmentation, generator, aspect=settings.aspect)
            with torch.set_grad_enabled(tuned):
                h_BH: Tensor = encoder(normalize(x_BCHW, config))
            optimizer.zero_grad()
            F.cross_entropy(head(h_BH), labels[rows.to(device)]).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        yield epoch + 1


def _optimizer(encoder: nn.Module, head: nn.Module, settings: FineTuneSettings) -> torch.optim.Optimizer:
    groups = [{"params": list(head.parameters()), "lr": settings.head_learning_rate}]
    if settings.encoder_learning_rate is not None:
        groups.append({"params": list(encoder.parameters()), "lr": settings.encoder_learning_rate})
    if settings.optimizer == "adam":
        return optimizers.Adam(groups, weight_decay=settings.weight_decay)
    return optimizers.SGD(
        groups, lr=settings.head_learning_rate, momentum=settings.momentum, weight_decay=settings.weight_decay
    )


def _decay(epoch: int, settings: FineTuneSettings) -> float:
    return 0.5 * (1 + math.cos(math.pi * epoch / settings.epochs)) if settings.schedule == "cosine" else 1.0


def _accuracy(head: nn.Module, features_NH: Tensor, labels_N: Tensor) -> float:
    """Return the accuracy, or NaN if fine-tuning diverged: argmax over NaN scores would report class 0."""
    head.eval()
    with torch.no_grad():
        scores_NC = head(features_NH).cpu()
    if not bool(scores_NC.isfinite().all()):
        return math.nan
    return int((scores_NC.argmax(dim=1) == labels_N).sum()) / len(labels_N)
