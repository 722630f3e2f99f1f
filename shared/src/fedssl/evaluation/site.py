"""The evaluation of an encoder at one site, on its own labelled images: counts per class, never anything per image.

The same function runs in a simulation and at a worker, so that both give the same counts.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedssl.data import ImageData, choose_images, normalize, to_float
from fedssl.data.batches import even_batches
from fedssl.data.site_labels import LabelSplit, SiteLabels, split_labels
from fedssl.errors import DataError
from fedssl.evaluation.features import extract_features
from fedssl.evaluation.neighbours import knn_scores
from fedssl.evaluation.probe import fit_probe
from fedssl.evaluation.site_heads import NO_HEADS, head_scores, packed, require_common, unpacked
from fedssl.models.batch_norm import recalibrate
from fedssl.precision import exact_float32
from fedssl.protocol.evaluation import SiteMeasure, SitesConfig
from fedssl.protocol.runs import RunSpec
from fedssl.protocol.site_evaluation import MOST_HEAD_NUMBERS, MeasureCounts, SiteCounts, SiteHead
from fedssl.seeding import derive_seed

Indices = NDArray[np.int64]
_THRESHOLD = 0.5  # the lowest score at which an image is predicted to have one of several labels


class SiteEvaluation(NamedTuple):
    """The counts of one site, and its own classifier if the spec has `cross_site`, or why there is none."""

    counts: SiteCounts
    head: SiteHead | None = None
    no_head: str | None = None


def evaluate_at_site(
    encoder: nn.Module,
    take: Callable[[Indices], ImageData],
    labels: SiteLabels,
    spec: RunSpec,
    client_id: str,
    *,
    heads: Mapping[SiteMeasure, Tensor] = NO_HEADS,
    min_count: int = 1,
    device: torch.device | str = "cpu",
    on_progress: Callable[[], None] = lambda: None,
) -> SiteEvaluation:
    """Return the counts of classifiers that are trained on a site's own labels, and of those of the run.

    Args:
        encoder: from images to (B, H), already on `device`. With `model.batch_norm = "recalibrate"`, its BatchNorms get
            the statistics of the site's training images.
        take: returns the site's images at some positions, in the run's shape.
        labels: the labels of the site's images, as numbers of the run's classes.
        spec: the run's spec, whose `evaluation.sites` names what to count.
        client_id: the site, whose name draws its split.
        heads: the run's classifiers by measure, as `site_heads.run_heads` returns them.
        min_count: the site's own minimum, if it is higher than the spec's.
        on_progress: called after every batch of images; what it raises ends the evaluation.

    Equal arguments give equal counts on one CPU thread. Raises DataError if too few classes have enough images.
    """
    config = spec.site_evaluation
    assert config is not None, "the run's spec has an evaluation at the sites"
    classes, split, fewest = evaluated_images(labels, spec, client_id, min_count)

    def represent(positions: Indices) -> Tensor:
        images = take(positions)
        return extract_features(encoder, images, spec.data, device, on_progress=lambda share: on_progress())

    if spec.model.batch_norm == "recalibrate":
        with exact_float32(device):
            recalibrate(encoder, _plain_batches(take, split.train, spec, device))
    train_NH, test_NH = represent(split.train), represent(split.test)
    measures, own = {}, None
    if bool(train_NH.isfinite().all() & test_NH.isfinite().all()):
        targets = tuple(_targets(labels, part, classes) for part in (split.train, split.test))
        for measure in config.site_measures:
            if measure in heads:
                scores = head_scores(heads[measure][classes], test_NH, multi_label=labels.is_multi_label)
            elif measure == "probe":
                probe = fit_probe(train_NH, targets[0])
                scores, own = probe.scores(test_NH), probe.rows()
            else:
                scores = _knn_scores(train_NH, targets[0], test_NH, len(classes))
            measures[measure] = count_predictions(scores.cpu(), targets[1], config.site_config)
        if config.site_config.cross_site == "personal":
            own = heads["personal"][classes]
    counts = _counts(classes, split, fewest, measures)
    if config.site_config.cross_site is None:
        return SiteEvaluation(counts)
    if own is None:
        return SiteEvaluation(counts, no_head="the encoder's training diverged")
    if own.numel() > MOST_HEAD_NUMBERS:
        why = f"a classifier of {own.numel()} weights is too large to be sent: at most {MOST_HEAD_NUMBERS} are"
        return SiteEvaluation(counts, no_head=why)
    return SiteEvaluation(counts, packed(own, counts.classes))


def evaluate_head(
    encoder: nn.Module,
    take: Callable[[Indices], ImageData],
    labels: SiteLabels,
    spec: RunSpec,
    client_id: str,
    head: SiteHead,
    *,
    min_count: int = 1,
    device: torch.device | str = "cpu",
    on_progress: Callable[[], None] = lambda: None,
) -> SiteCounts:
    """Return the counts of another site's classifier on this site's test images.

    The images and classes are those of `evaluate_at_site`, whose arguments these are. The classifier predicts one of
    these classes; the images of a class that it does not have are all counted as wrong. Raises DataError, also if the
    classifier has none of the classes or another width.
    """
    config = spec.site_evaluation
    assert config is not None, "the run's spec has an evaluation at the sites"
    assert config.site_config.cross_site is not None, "no other run sends classifiers of sites"
    classes, split, fewest = evaluated_images(labels, spec, client_id, min_count)
    require_common(head, classes.tolist())
    images = take(split.test)
    test_NH = extract_features(encoder, images, spec.data, device, on_progress=lambda share: on_progress())
    measures: dict[SiteMeasure, MeasureCounts] = {}
    if bool(test_NH.isfinite().all()):
        rows = unpacked(head, len(config.site_config.classes))[classes]
        scores = head_scores(rows, test_NH, multi_label=labels.is_multi_label)
        targets = _targets(labels, split.test, classes)
        measures[config.site_config.cross_site] = count_predictions(scores.cpu(), targets, config.site_config)
    return _counts(classes, split, fewest, measures)


def _counts(
    classes: Indices, split: LabelSplit, fewest: int, measures: Mapping[SiteMeasure, MeasureCounts]
) -> SiteCounts:
    return SiteCounts(
        classes=tuple(classes.tolist()),
        min_count=fewest,
        num_train=len(split.train),
        num_test=len(split.test),
        measures=dict(measures),
    )


def weights_at_site(
    model: Mapping[str, Tensor], state: Mapping[str, Tensor] | None, spec: RunSpec, round_number: int
) -> Mapping[str, Tensor]:
    """Return the weights after a round as a site evaluates them: with its own BatchNorm if each site keeps its own.

    Args:
        model: the weights after the round; round 0 has the first weights.
        state: the client state of the site's newest training up to this round.

    Raises DataError if the site has not trained, and therefore has no BatchNorm of its own.
    """
    if spec.model.batch_norm != "local" or round_number == 0:
        return model
    own = {name: tensor for name, tensor in (state or {}).items() if name in model}
    if not own:
        raise DataError(
            f"this site has not trained up to round {round_number}, so it has no BatchNorm of its own, and the weights "
            "without one cannot be evaluated"
        )
    return {**model, **own}


def evaluated_images(
    labels: SiteLabels, spec: RunSpec, client_id: str, min_count: int
) -> tuple[Indices, LabelSplit, int]:
    """Return the numbers of the classes that a site evaluates, the images that have them, and the fewest per class.

    The arguments are those of `evaluate_at_site`. Raises DataError if too few classes have enough images.
    """
    config = spec.site_evaluation
    assert config is not None, "the run's spec has an evaluation at the sites"
    split = split_labels(labels, config.site_config.test_share, derive_seed(spec.seed, 0, client_id, "site labels"))
    limits = (config.max_train, config.max_test)
    train, test = (
        part[choose_images(len(part), limit, spec.seed)]
        for part, limit in zip((split.train, split.test), limits, strict=True)
    )
    fewest = max(min_count, config.site_config.min_count)
    return *_evaluated(labels, LabelSplit(train, test), fewest), fewest


def count_predictions(scores_NC: Tensor, targets: Tensor, config: SitesConfig) -> MeasureCounts:
    """Return the counts of a classifier's scores, 0..1, for images with the class numbers (N,) or labels (N, C)."""
    num_classes, num_bins = scores_NC.shape[1], config.score_bins
    several = targets.ndim == 2
    presence_NC = targets if several else torch.nn.functional.one_hot(targets, num_classes)
    bins_NC = (scores_NC * num_bins).floor().clamp(0, num_bins - 1).long()
    confusion = (
        [
            torch.bincount(presence_NC[:, c] + 2 * (scores_NC[:, c] >= _THRESHOLD).long(), minlength=4).tolist()
            for c in range(num_classes)
        ]
        if several
        else torch.bincount(targets * num_classes + scores_NC.argmax(dim=1), minlength=num_classes**2)
        .view(num_classes, num_classes)
        .tolist()
    )

    def counted(wanted: int) -> list[list[int]]:
        return [
            torch.bincount(bins_NC[presence_NC[:, c] == wanted, c], minlength=num_bins).tolist()
            for c in range(num_classes)
        ]

    return MeasureCounts.model_validate({"confusion": confusion, "positives": counted(1), "negatives": counted(0)})


def _evaluated(labels: SiteLabels, split: LabelSplit, fewest: int) -> tuple[Indices, LabelSplit]:
    """Return the numbers of the classes with enough images, and the images that have them. Raises DataError.

    With several labels per image, a label needs that many images with it and that many without it, and no image is
    left out.
    """
    num_classes = len(labels.class_names)
    enough = np.ones(num_classes, np.bool_)
    for part in (split.train, split.test):
        own = labels.labels[part]
        if labels.is_multi_label:
            enough &= (own.sum(axis=0) >= fewest) & ((1 - own).sum(axis=0) >= fewest)
        else:
            enough &= np.bincount(own, minlength=num_classes) >= fewest
    classes, needed = np.flatnonzero(enough), 1 if labels.is_multi_label else 2
    if len(classes) < needed:
        raise DataError(
            f"{len(classes)} of the run's {num_classes} classes have at least {fewest} training and {fewest} test "
            f"images at this site, and a classifier needs {needed}: label more images, or lower min_count"
        )
    if labels.is_multi_label:
        return classes, split
    kept = (part[np.isin(labels.labels[part], classes)] for part in (split.train, split.test))
    return classes, LabelSplit(*kept)


def _plain_batches(
    take: Callable[[Indices], ImageData], positions: Indices, spec: RunSpec, device: torch.device | str
) -> Iterator[Tensor]:
    """Yield images, not augmented, as the encoder takes them, in `even_batches` of about the training's size."""
    for part in even_batches(len(positions), spec.training.batch_size):
        images = torch.tensor(take(positions[part.numpy()]).images)
        yield normalize(to_float(images.to(device)), spec.data)


def _targets(labels: SiteLabels, positions: Indices, classes: Indices) -> Tensor:
    """Return class numbers (N,) among the evaluated classes, or the presence (N, K) of several labels."""
    own = labels.labels[positions]
    return torch.from_numpy(own[:, classes] if labels.is_multi_label else np.searchsorted(classes, own))


def _knn_scores(train_NH: Tensor, targets: Tensor, test_NH: Tensor, num_classes: int) -> Tensor:
    presence_NC = targets if targets.ndim == 2 else torch.nn.functional.one_hot(targets, num_classes)
    return knn_scores(train_NH, presence_NC, test_NH)
