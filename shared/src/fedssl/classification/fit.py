"""Fits a linear classifier to labelled images: ridge regression, whose scores become probabilities by one scale.

The classifier is that of :func:`fedssl.evaluation.ridge_solution` (docs/evaluation.md, "A probe from sums"). Its scores
estimate the presence of each class, 0..1, and are not probabilities yet. With the scores s (C,) of an image,

    p = softmax(a * s),  or with several labels per image  p_c = sigmoid(a * (s_c - 1/2)),

where the scale a > 0 minimises the cross-entropy on held-out images (temperature scaling: Guo et al. 2017, "On
Calibration of Modern Neural Networks"). Their targets are smoothed as by Platt (1999, "Probabilistic outputs for
support vector machines", Eq. 13), so that a few images that are all classified correctly do not make the classifier
infinitely sure. The penalty of the ridge regression is the one of :func:`fedssl.evaluation.ridge_path` with the
smallest cross-entropy. The classifier is then fitted again to all labelled images, with that penalty in proportion to
their number, and that scale.
"""

import math
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fedssl.classification.classify import predictions
from fedssl.classification.labelled import Labelled
from fedssl.data.array_files import memory_bytes
from fedssl.data.site_labels import SiteLabels, split_labels
from fedssl.embeddings.encoders import BATCH_SIZE, Model
from fedssl.embeddings.outcome import Done, summarised
from fedssl.errors import ArtifactError, DataError
from fedssl.evaluation import ridge_path, ridge_solution, ridge_sums
from fedssl.models.classifier import Head

HELD_OUT_SHARE = 0.2
_SEED = 0
_LOWEST_SCALE, _HIGHEST_SCALE = 0.1, 1000.0
_STEPS = 21


@dataclass(frozen=True, slots=True)
class ClassFit:
    """How well the classifier finds the images of a class.

    Attributes:
        name: the class.
        num_images: the labelled images that have it.
        num_held_out: those of them that were held out.
        num_right: those of the held-out images for which it was predicted.
    """

    name: str
    num_images: int
    num_held_out: int
    num_right: int


@dataclass(frozen=True, slots=True)
class Fit:
    """A classifier, and how well it performs.

    Attributes:
        head: the classifier, fitted to all labelled images.
        classes: about each class, from the classifier that was fitted without the held-out images.
        accuracy: the share of the held-out images that it classified correctly; with several labels per image, of all
        pairs of an image and a label. The penalty and the scale were chosen on the same images.
        left_out: which of the labelled images could not be decoded.
    """

    head: Head
    classes: list[ClassFit]
    accuracy: float
    left_out: list[dict[str, str]]


def fit_head(
    labelled: Labelled,
    model: Model,
    *,
    device: torch.device | str = "cpu",
    on_progress: Callable[[int], None] = lambda num: None,
) -> Fit:
    """Fit a classifier to labelled images. Equal images, labels and encoder give equal bits on one CPU thread.

    A fifth of the images of each class is held out, or the labels' own split is used; a group is never divided.

    Args:
        labelled: the images and their labels.
        model: the encoder; it is moved to `device`.
        device: where the encoder runs. The classifier is fitted on the CPU, in float64.
        on_progress: called after each batch with the number of images that are done.

    Raises DataError: no image can be decoded, a class has no image, or none can be held out.
    """
    h_NH, labels, left_out = _represent(labelled, model, device, on_progress)
    _require_examples(labels)
    split = split_labels(labels, HELD_OUT_SHARE, _SEED)
    if not len(split.test) or not len(split.train):
        raise DataError(
            f"none of the {len(labels):,} labelled images can be held out to test the classifier: label 3 or more "
            "images (or groups) per class"
        )
    num_classes, targets = len(labels.class_names), torch.from_numpy(labels.labels)
    train, test = torch.from_numpy(split.train), torch.from_numpy(split.test)
    chosen = _choose(h_NH[train], targets[train], h_NH[test], targets[test], num_classes)
    gram, moment = ridge_sums(h_NH, targets, num_classes)
    ridge = ridge_path(gram)[chosen.place]
    weights = chosen.scale * ridge_solution(gram, moment, ridge)
    bias = weights[-1] - (chosen.scale / 2 if labels.is_multi_label else 0)
    presence_NC = _presence(targets, num_classes)
    predicted_NC = predictions(chosen.scores, multi_label=labels.is_multi_label)
    right_NC = presence_NC[test] == predicted_NC
    accuracy = float((right_NC if labels.is_multi_label else right_NC.all(dim=1)).double().mean())
    found = {"accuracy": accuracy, "cross_entropy": chosen.cross_entropy, "ridge": ridge, "scale": chosen.scale}
    numbers = {"num_images": len(labels), "num_held_out": len(test), **found}
    head = Head(
        weight=weights[:-1].T.float().contiguous(),
        bias=bias.float(),
        class_names=labels.class_names,
        multi_label=labels.is_multi_label,
        about={**model.identity(), "fit": numbers},
    )
    counts = [presence_NC.sum(dim=0), presence_NC[test].sum(dim=0), (presence_NC[test] & predicted_NC).sum(dim=0)]
    rows = torch.stack(counts, dim=1).tolist()
    classes = [ClassFit(name, *row) for name, row in zip(labels.class_names, rows, strict=True)]
    return Fit(head, classes, accuracy, left_out)


def best_scale(scores_NC: Tensor, targets: Tensor) -> tuple[float, float]:
    """Return the scale `a` with the smallest cross-entropy of p (see above), and this cross-entropy.

    It is convex in `a`, so that a finer grid between the neighbours of the best point of a coarse one holds the
    minimum. `a` is between 0.1 and 1000.

    Args:
        scores_NC: the classifier's scores for held-out images, float64.
        targets: class numbers (N,), or the presence (N, C) of several labels.
    """
    low, high = math.log(_LOWEST_SCALE), math.log(_HIGHEST_SCALE)
    for _ in range(4):
        scales = torch.linspace(low, high, _STEPS, dtype=torch.float64)
        losses = torch.stack([_cross_entropy(float(scale.exp()), scores_NC, targets) for scale in scales])
        best = int(losses.argmin())
        low, high = float(scales[max(0, best - 1)]), float(scales[min(_STEPS - 1, best + 1)])
    return float(scales[best].exp()), float(losses[best])


@dataclass(frozen=True, slots=True)
class _Chosen:
    """The penalty, by its place in the path, and the scale. `scores` (N, C) are those of the held-out images."""

    place: int
    scale: float
    cross_entropy: float
    scores: Tensor


def _choose(train_NH: Tensor, train: Tensor, test_NH: Tensor, test: Tensor, num_classes: int) -> _Chosen:
    gram, moment = ridge_sums(train_NH, train, num_classes)
    inputs_NX = torch.cat([test_NH.double(), torch.ones(len(test_NH), 1, dtype=torch.float64)], dim=1)
    found, failure = [], None
    for place, ridge in enumerate(ridge_path(gram)):
        try:
            scores_NC = inputs_NX @ ridge_solution(gram, moment, ridge)
        except ArtifactError as error:  # the penalty is too small for these images
            failure = error
            continue
        found.append(_Chosen(place, *best_scale(scores_NC, test), scores_NC))
    if not found:
        assert failure is not None, "the path has penalties"
        raise failure
    return min(found, key=lambda each: each.cross_entropy)


def _cross_entropy(scale: float, scores_NC: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy per image. With n images, targets t become (n t + 1) / (n + C), or / (n + 2)."""
    num_images, num_classes = scores_NC.shape
    presence_NC = _presence(targets, num_classes).double()
    if targets.ndim == 2:
        smoothed_NC = (num_images * presence_NC + 1) / (num_images + 2)
        logits_NC = scale * (scores_NC - 0.5)
        return F.binary_cross_entropy_with_logits(logits_NC, smoothed_NC, reduction="sum") / num_images
    smoothed_NC = (num_images * presence_NC + 1) / (num_images + num_classes)
    return F.cross_entropy(scale * scores_NC, smoothed_NC)


def _presence(targets: Tensor, num_classes: int) -> Tensor:
    """Return which classes each image has, bool (N, C)."""
    return (targets if targets.ndim == 2 else F.one_hot(targets, num_classes)).bool()


def _represent(
    labelled: Labelled, model: Model, device: torch.device | str, on_progress: Callable[[int], None]
) -> tuple[Tensor, SiteLabels, list[dict[str, str]]]:
    """Return float32 (N, H) of the images that can be decoded, their labels, and which are left out."""
    source, width = labelled.source, model.encoder.feature_dim
    if 8 * width * len(source) > memory_bytes():
        raise DataError(f"the representations of {len(source):,} labelled images do not fit into memory: label fewer")
    model.encoder.to(device)
    parts, done = [], []
    with closing(source.batches(model.encoder.data, BATCH_SIZE, 0)) as batches:
        for batch in batches:
            done.append(Done(len(batch.images), batch.damaged, batch.num_deep, batch.highest))
            if len(batch.images):
                parts.append(model.represent(batch.images, device))
            on_progress(min(len(source), len(done) * BATCH_SIZE))
    _, left_out = summarised(source, done)
    labels = labelled.labels.without([position for each in done for position, _ in each.damaged])
    return torch.cat(parts), labels, left_out["first"]


def _require_examples(labels: SiteLabels) -> None:
    """Raise DataError unless each class has an image, and, with several labels, an image that lacks it."""
    presence_NC = _presence(torch.from_numpy(labels.labels), len(labels.class_names))
    for name, num in zip(labels.class_names, presence_NC.sum(dim=0).tolist(), strict=True):
        if num == 0 or (labels.is_multi_label and num == len(labels)):
            which = "all" if num else "none"
            raise DataError(
                f"{which} of the {len(labels):,} labelled images are {name!r}, which nothing can be learnt from: label "
                "others, or leave this class out"
            )
