"""Semi-supervised evaluation: the encoder and a new classifier are trained on a few labelled images."""

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Literal

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from fedssl.data import ImageData, epoch_batches, normalize, random_view, to_float
from fedssl.errors import DataError
from fedssl.evaluation.features import extract_features
from fedssl.protocol.data import AugmentationConfig, DataConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class FineTuneSettings:
    """How the network is fine-tuned.

    Attributes:
        optimizer: with `momentum` and `weight_decay` (momentum for SGD only).
        encoder_learning_rate: None keeps the encoder's weights; its BatchNorm statistics still follow the images.
        head_learning_rate: of the classifier.
        hidden_dim: None for a linear classifier, else the width of one hidden layer with BatchNorm and ReLU.
        batch_size, epochs: over the labelled images; a last incomplete batch is used.
        evaluate_every: epochs between two tests; the last epoch is always tested.
        augmentation: of the training images; None for none.
        seed: of the classifier's first weights, the order and the views.
    """

    optimizer: Literal["sgd", "adam"] = "sgd"
    encoder_learning_rate: float | None = 1e-3
    head_learning_rate: float = 0.3
    momentum: float = 0.9
    weight_decay: float = 0.0
    hidden_dim: int | None = None
    batch_size: int = 128
    epochs: int = 200
    evaluate_every: int = 50
    augmentation: AugmentationConfig | None = None
    seed: int = 0


@dataclass(frozen=True, slots=True)
class FineTuneResult:
    """Accuracies are shares of the test set, 0..1; `best_accuracy` is chosen on it: report it only beside the last."""

    accuracy: float
    best_accuracy: float
    num_labelled: int


_CROP_AND_FLIP = AugmentationConfig(min_scale=0.64, jitter=0, greyscale=0, flip=0.5)

FINE_TUNINGS: Final = MappingProxyType(
    {
        # SSD's crop keeps the aspect ratio at 1; this one lets it vary as the training views do.
        "ssd": FineTuneSettings(augmentation=_CROP_AND_FLIP),
        # FedX states the optimiser, the learning rate and the epochs; the rest is chosen here.
        "fedx": FineTuneSettings(head_learning_rate=1e-3, epochs=100, evaluate_every=10, augmentation=_CROP_AND_FLIP),
        # What EasyFL's code does for FedU and FedEMA, though the papers say that the whole network is tuned.
        "easyfl": FineTuneSettings(
            optimizer="adam", encoder_learning_rate=None, head_learning_rate=1e-3, hidden_dim=4096, epochs=100,
            evaluate_every=1,
        ),
    }
)  # fmt: skip
"""Settings by the paper or code that they come from."""


def labelled_share(
    labels: NDArray[np.int64], share: float, seed: int, rule: Literal["stratified", "first"] = "stratified"
) -> NDArray[np.int64]:
    """Sorted indices of the images that keep their labels.

    Args:
        labels: class numbers (N,).
        share: of the images, in (0, 1].
        seed: of the choice.
        rule: `stratified` takes the share of each class at random, one image at least; `first` takes the first images
            of the set, as EasyFL does.
    """
    if not 0 < share <= 1:
        raise ValueError(f"share must lie in (0, 1], got {share}")
    if rule == "first":
        return np.arange(max(1, int(share * len(labels))), dtype=np.int64)
    rng = np.random.default_rng(seed)
    members = [rng.permutation(np.flatnonzero(labels == label)) for label in np.unique(labels)]
    return np.sort(np.concatenate([indices[: max(1, round(share * len(indices)))] for indices in members]))


def fine_tune(
    encoder: nn.Module,
    train: ImageData,
    test: ImageData,
    config: DataConfig,
    *,
    settings: FineTuneSettings = FINE_TUNINGS["ssd"],
    device: torch.device | str = "cpu",
) -> FineTuneResult:
    """Trains a copy of the encoder with a classifier on the labelled images and tests it.

    Args:
        encoder: from images to (B, H); it is not changed.
        train: the labelled images; :func:`labelled_share` chooses them.
        test: the labelled test set.
        config: shape and normalisation of the images.

    Raises:
        DataError: a set has no labels or no images.
    """
    if train.labels is None or test.labels is None or not len(train) or not len(test):
        raise DataError("fine-tuning needs labelled images to train on and to test with")
    num_classes = int(max(train.labels.max(), test.labels.max())) + 1
    encoder = copy.deepcopy(encoder).to(device)
    width = extract_features(encoder, train.subset(np.arange(1)), config, device).shape[1]
    head = _head(width, num_classes, settings).to(device)
    test_labels = torch.from_numpy(test.labels)
    accuracies: list[float] = []
    for epoch in _epochs(encoder, head, train, config, settings, device):
        if (epoch + 1) % settings.evaluate_every == 0 or epoch + 1 == settings.epochs:
            accuracies.append(_accuracy(head, extract_features(encoder, test, config, device), test_labels))
    return FineTuneResult(accuracies[-1], max(accuracies), len(train))


def _head(width: int, num_classes: int, settings: FineTuneSettings) -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(settings.seed)
        if settings.hidden_dim is None:
            return nn.Sequential(nn.Linear(width, num_classes))
        hidden = nn.Linear(width, settings.hidden_dim, bias=False)
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
    """Trains an epoch each time it is asked for the next."""
    generator = torch.Generator().manual_seed(settings.seed)
    optimizer = _optimizer(encoder, head, settings)
    images, labels = torch.tensor(train.images), torch.tensor(train.labels)
    for epoch in range(settings.epochs):
        encoder.train()
        head.train()
        for rows in epoch_batches(len(images), settings.batch_size, generator, drop_last=False):
            x_BCHW = to_float(images[rows].to(device))
            if settings.augmentation is not None:
                x_BCHW = random_view(x_BCHW, settings.augmentation, generator)
            with torch.set_grad_enabled(settings.encoder_learning_rate is not None):
                h_BH: Tensor = encoder(normalize(x_BCHW, config))
            optimizer.zero_grad()
            F.cross_entropy(head(h_BH), labels[rows].to(device)).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        yield epoch


def _optimizer(encoder: nn.Module, head: nn.Module, settings: FineTuneSettings) -> torch.optim.Optimizer:
    groups = [{"params": list(head.parameters()), "lr": settings.head_learning_rate}]
    if settings.encoder_learning_rate is not None:
        groups.append({"params": list(encoder.parameters()), "lr": settings.encoder_learning_rate})
    if settings.optimizer == "adam":
        return torch.optim.Adam(groups, weight_decay=settings.weight_decay)
    return torch.optim.SGD(
        groups, lr=settings.head_learning_rate, momentum=settings.momentum, weight_decay=settings.weight_decay
    )


def _accuracy(head: nn.Module, features_NH: Tensor, labels_N: Tensor) -> float:
    head.eval()
    device = next(head.parameters()).device
    with torch.no_grad():
        predicted = head(features_NH.to(device)).argmax(dim=1).cpu()
    return int((predicted == labels_N).sum()) / len(labels_N)
