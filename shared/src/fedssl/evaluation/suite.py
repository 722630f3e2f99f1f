"""The evaluation of an encoder that `simulate`, `compare`, the demo, the command line and the coordinator share.

Names of results: `probe` and `knn` are shares of the test set, 0..1; `uniformity`, `alignment`, `effective_rank`,
`effective_rank_centered` and `feature_std` are computed from the representations of the test set.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from fedssl.data import ImageData, Split, choose_images, load_conformed
from fedssl.data.datasets import require_whole_groups
from fedssl.errors import DataError, SpecError
from fedssl.evaluation import (
    PROBES,
    ProbeResult,
    alignment,
    effective_rank,
    extract_features,
    feature_std,
    knn_accuracy,
    labels_of,
    linear_probe,
    probe_encoder,
    uniformity,
)
from fedssl.models import build_mlp, encoder_of, initialised, loaded
from fedssl.models.pretrained import require_batch_norm
from fedssl.protocol.data import DataConfig
from fedssl.protocol.evaluation import JudgingConfig, Measure
from fedssl.protocol.runs import RunSpec

OnProgress = Callable[[str, float | None], None]
"""Called with the name of the current step and the share of it that is done, None if that is unknown."""

OnResults = Callable[[dict[str, float]], None]
"""Called with the results of each measure, by name, as soon as they are computed."""

RESULTS: Mapping[Measure, tuple[str, ...]] = {
    "probe": ("probe",),
    "knn": ("knn",),
    "geometry": ("uniformity", "alignment", "effective_rank", "effective_rank_centered", "feature_std"),
}
"""The results that each measure gives, by name."""

MAX_CLASSES = 65_536
_FIRST_VIEW, _SECOND_VIEW = 0, 1  # the seeds of the views that alignment compares


@dataclass(frozen=True, slots=True)
class Labelled:
    """Labelled images of the run's shape: classifiers are trained on `train`, everything is measured on `test`."""

    train: ImageData
    test: ImageData


@dataclass(frozen=True, slots=True)
class EncoderEvaluation:
    """The evaluation of an encoder.

    Attributes:
        results: the results by name; all are NaN if the encoder's training diverged.
        probe: the full result of the linear probe; None if it was not requested, or if the training diverged.
        test_features: representations (N, H) of the test images, on the device.
    """

    results: dict[str, float]
    probe: ProbeResult | None
    test_features: Tensor


def load_labelled(
    name_or_path: str,
    data: DataConfig,
    *,
    max_train: int | None,
    max_test: int | None,
    seed: int,
    root: Path | None = None,
) -> Labelled:
    """Load both splits of a data set, in the shape of the run's images.

    Args:
        name_or_path: as in :func:`fedssl.data.load_dataset`.
        data: the shape of the run's images, to which these are converted.
        max_train, max_test: use this many images, drawn by the seed; None means all of them.
        seed: the seed of the choice.
        root: a folder in which to search for the data set before the usual places.

    Raises:
        DataError: the images cannot be read, have no labels or far too many classes, or both splits have images of one
            group, such as a patient.
    """
    require_whole_groups(name_or_path, root)

    def load(split: Split, limit: int | None) -> ImageData:
        images = load_conformed(name_or_path, split, data, root)
        if images.labels is None:
            raise DataError(
                f"the {split} split of {name_or_path} has no labels: an encoder is evaluated by how well its output "
                "predicts them"
            )
        if not len(images) or int(images.labels.max()) >= MAX_CLASSES:
            raise DataError(f"the {split} split of {name_or_path} needs images of at most {MAX_CLASSES} classes")
        return images.subset(choose_images(len(images), limit, seed))

    return Labelled(load("train", max_train), load("test", max_test))


def load_encoder(tensors: Mapping[str, Tensor], spec: RunSpec) -> nn.Module:
    """Load the encoder from the tensors of a global model.

    Raises SpecError if they do not hold the encoder that the spec describes, or lack a BatchNorm that was trained.
    """
    require_batch_norm(spec)
    return encoder_of(tensors, spec.model.encoder, spec.data)


def load_projected(tensors: Mapping[str, Tensor], spec: RunSpec) -> nn.Module:
    """Load encoder and projector, from images to embeddings z. Raises SpecError if the tensors do not hold them."""
    if (head := spec.model.projector) is None:
        raise SpecError("the spec's model has no projector: its embeddings are the representations")
    projector = initialised(lambda: build_mlp(head, spec.model.encoder.feature_dim), 0)
    return nn.Sequential(load_encoder(tensors, spec), loaded(projector, "projector", tensors))


def evaluate_encoder(
    encoder: nn.Module,
    labelled: Labelled,
    config: JudgingConfig,
    data: DataConfig,
    *,
    device: torch.device | str = "cpu",
    on_progress: OnProgress = lambda what, share: None,
    on_results: OnResults = lambda results: None,
) -> dict[str, float]:
    """Return the results of :func:`detailed_evaluation` by name."""
    found = detailed_evaluation(
        encoder, labelled, config, data, device=device, on_progress=on_progress, on_results=on_results
    )
    return found.results


def detailed_evaluation(
    encoder: nn.Module,
    labelled: Labelled,
    config: JudgingConfig,
    data: DataConfig,
    *,
    device: torch.device | str = "cpu",
    on_progress: OnProgress = lambda what, share: None,
    on_results: OnResults = lambda results: None,
) -> EncoderEvaluation:
    """Evaluate an encoder by the measures of `config.measures`.

    Args:
        encoder: from images to (B, H); it is moved to `device` and otherwise unchanged.
        labelled: from :func:`load_labelled`.
        config: the measures and the probe's settings.
        data: shape, normalisation and augmentation of the run's images.
        device: where everything is computed.
        on_progress: see :data:`OnProgress`.
        on_results: see :data:`OnResults`.

    Equal arguments give equal numbers on one CPU thread. The numbers of a measure do not depend on the other measures.
    No global random state is read or changed.
    """
    encoder.to(device)

    def represent(images: ImageData, what: str) -> Tensor:
        return extract_features(encoder, images, data, device, on_progress=lambda share: on_progress(what, share))

    test_NH = represent(labelled.test, "representations of the test images")
    classified = "probe" in config.measures or "knn" in config.measures
    train_NH = represent(labelled.train, "representations of the training images") if classified else test_NH[:0]
    if not bool(test_NH.isfinite().all() & train_NH.isfinite().all()):
        nothing = {name: math.nan for measure in config.measures for name in RESULTS[measure]}
        on_results(nothing)
        return EncoderEvaluation(nothing, None, test_NH)
    sides = (train_NH, labels_of(labelled.train).to(device), test_NH, labels_of(labelled.test).to(device))
    results: dict[str, float] = {}

    def keep(found: dict[str, float]) -> None:
        results.update(found)
        on_results(found)

    probe = None
    if "probe" in config.measures:
        probe = _probe(encoder, labelled, config, data, sides, device, on_progress)
        keep({"probe": probe.accuracy})
    if "knn" in config.measures:
        on_progress("nearest neighbours", None)
        keep({"knn": knn_accuracy(*sides)})
    if "geometry" in config.measures:
        on_progress("geometry", None)
        keep(_geometry(encoder, labelled.test, test_NH, data, device))
    return EncoderEvaluation(results, probe, test_NH)


def _probe(
    encoder: nn.Module,
    labelled: Labelled,
    config: JudgingConfig,
    data: DataConfig,
    sides: tuple[Tensor, Tensor, Tensor, Tensor],
    device: torch.device | str,
    on_progress: OnProgress,
) -> ProbeResult:
    settings = PROBES[config.settings]

    def tell(share: float) -> None:
        on_progress("linear probe", share)

    on_progress("linear probe", None)
    if settings.augmentation is None:
        return linear_probe(*sides, settings=settings, on_progress=tell)
    return probe_encoder(
        encoder, labelled.train, labelled.test, data, settings=settings, device=device, on_progress=tell
    )


def _geometry(
    encoder: nn.Module, test: ImageData, test_NH: Tensor, data: DataConfig, device: torch.device | str
) -> dict[str, float]:
    views = [
        extract_features(encoder, test, data, device, augmentation=data.augmentation, seed=seed)
        for seed in (_FIRST_VIEW, _SECOND_VIEW)
    ]
    return {
        "uniformity": uniformity(test_NH),
        "alignment": alignment(*views),
        "effective_rank": effective_rank(test_NH),
        "effective_rank_centered": effective_rank(test_NH, center=True),
        "feature_std": feature_std(test_NH),
    }
