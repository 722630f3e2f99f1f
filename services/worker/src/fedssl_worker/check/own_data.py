"""The images and labels of the site, as a worker would use them."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from fedssl.artifacts.images import MAX_SIZE
from fedssl.artifacts.permission import evaluation_rule
from fedssl.cli.doctor.checks import own_images
from fedssl.cli.doctor.findings import Check, Found
from fedssl.cli.output import size
from fedssl.data import ImageData, conform, load_dataset
from fedssl.data.datasets import count_images, find_path, list_files, list_images
from fedssl.data.decoding import decode_to_memory
from fedssl.data.reading import Reading
from fedssl.data.site_labels import SiteLabels, require_columns, with_run_classes
from fedssl.errors import DataError
from fedssl.evaluation.site import evaluated_images
from fedssl.methods.site_data import wants_site_labels
from fedssl.models import build_encoder
from fedssl.models.initialisation import on_meta_device
from fedssl.protocol.data import KNOWN_DATASETS, DataConfig, ServedShapes
from fedssl.protocol.evaluation import DEFAULT_MIN_COUNT, EvaluationConfig
from fedssl.protocol.methods.supervised import SupervisedConfig
from fedssl.protocol.policy import SiteArtifact
from fedssl.protocol.runs import RunSpec
from fedssl.protocol.site_evaluation import BINARY_COLUMNS, MeasureCounts, SiteCounts
from fedssl.wording import plural
from fedssl_worker.check.outgoing import Outgoing
from fedssl_worker.disclosure.policy import Policy
from fedssl_worker.labels import OwnLabels, load_own_labels, require_class_folders
from fedssl_worker.settings import Settings

_ANY_CLIENT = "client"  # draws the split of the labels if no policy names the client
_FOLDERS = "add empty folders, or ask the run's operator"
_REPAIR = "correct the labels: docs/data.md describes them"


@dataclass(frozen=True, slots=True)
class ImagesFound:
    """The check of the images, and how many a worker would train on; 0 if it could not."""

    check: Check
    num_images: int


def check_images(settings: Settings, spec: RunSpec | None) -> ImagesFound:
    """Decode a sample of the images, and compare their shape with what a run needs."""
    try:
        is_known = settings.data in KNOWN_DATASETS
        check = own_images(Path(settings.data) if is_known else find_path(settings.data, None))
        num_images = 0 if check.found is Found.WRONG else count_images(settings.data, "train")
    except DataError as error:
        return ImagesFound(Check("data", Found.WRONG, str(error), "correct --data"), 0)
    if spec is not None and check.found is not Found.WRONG:
        # Without --channels, a worker whose images have a number of channels other than 1 and 3 serves that number: the
        # trial decodes them.
        most = settings.channels or max(3, spec.data.channels)
        serves = ServedShapes(max_image_size=settings.image_size or MAX_SIZE, max_channels=most)
        if (why := serves.refusal(spec.data)) is not None:
            return ImagesFound(Check("data", Found.WRONG, f"{check.what}; {why}", "correct --image-size"), 0)
    return ImagesFound(check, num_images)


def sample_images(name_or_path: str, config: DataConfig, most: int) -> ImageData:
    """Return at most `most` images, spread evenly over all, in the shape of a run. Raises DataError."""
    if (files := list_files(name_or_path, "train")) is not None:
        positions = _spread(len(files), most)
        names = tuple(files.names[position] for position in positions)
        sampled = replace(files, names=names, labels=None, groups=None, reading=Reading.of(config))
        labels = None if files.labels is None else files.labels[positions]
        pixels, unreadable = decode_to_memory(sampled, config.channels, config.image_size)
        return ImageData(pixels, None if labels is None else np.delete(labels, unreadable))
    images = load_dataset(name_or_path, "train", reading=Reading.of(config))
    positions = _spread(len(images), most)
    labels = None if images.labels is None else images.labels[positions]
    return conform(ImageData(np.array(images.images[positions]), labels), config)


def check_labels(
    settings: Settings, spec: RunSpec | None, num_images: int, outgoing: Outgoing | None
) -> Iterator[Check]:
    """Check the labels, their groups, and what an evaluation of a run would send of them."""
    config = None if spec is None else spec.site_evaluation
    trained = None if spec is None else wants_site_labels(spec)
    own = None
    if settings.labels is None and settings.label_names is None:
        if trained is not None:
            what = f"none: {trained.name} trains on them, so this worker would decline the rounds of the run"
            yield Check("labels", Found.WRONG, what, "give --labels")
        elif config is not None:
            todo = "give --labels if this site is to evaluate the run's encoder"
            yield Check("labels", Found.NOTE, "none: this worker would refuse the evaluations at the sites", todo)
    if not num_images:
        return
    try:
        own = load_own_labels(settings.data, settings.labels, settings.label_names, num_images)
        if own is not None:
            yield Check("labels", Found.OK, _described(own.labels))
            if trained is not None:
                several, renamed = trained.multi_label, own.renamed
                require_columns(with_run_classes(own.labels, trained.classes, multi_label=several, renamed=renamed))
        if own is not None and spec is not None and config is not None:
            yield _evaluation(own, spec, config, outgoing)
            yield from _cross_site(spec, config, outgoing)
    except DataError as error:
        yield Check("labels", Found.WRONG, str(error), _REPAIR)
    if spec is not None and isinstance(spec.method, SupervisedConfig):
        yield from _class_folders(settings, spec.method)
    if spec is not None and spec.data.distinct_groups and not _has_groups(settings, own):
        what = "the images have none, which data.distinct_groups needs: this worker would decline the run's rounds"
        yield Check("groups", Found.WRONG, what, "give a file of labels with a column group")


def _class_folders(settings: Settings, method: SupervisedConfig) -> Iterator[Check]:
    files = list_files(settings.data, "train")
    try:
        require_class_folders(None if files is None or files.labels is None else len(files.class_names), method)
    except DataError as error:
        yield Check("class folders", Found.WRONG, f"{error}; this worker would decline the run's rounds", _FOLDERS)


def _has_groups(settings: Settings, own: OwnLabels | None) -> bool:
    """Return whether the labels have groups, or else the files, as the worker's batches take them."""
    if own is not None and own.labels.groups is not None:
        return True
    return list_images(settings.data, "train").groups is not None


def _described(labels: SiteLabels) -> str:
    several = ", several per image" if labels.is_multi_label else ""
    num_labelled = int(labels.is_labelled.sum())
    return f"{num_labelled:,} of {len(labels):,} images have labels of {len(labels.class_names)} classes{several}"


def _evaluation(own: OwnLabels, spec: RunSpec, config: EvaluationConfig, outgoing: Outgoing | None) -> Check:
    """Return what an evaluation at this site sends. Raises DataError if the labels do not fit the run."""
    name, fewest, client_id, sites = "evaluation at the site", 1, _ANY_CLIENT, config.site_config
    if outgoing is not None and outgoing.policy is not None and (notice := outgoing.notice) is not None:
        client_id = outgoing.policy.client
        rule, why = evaluation_rule(notice, spec, spec.num_rounds)
        if rule is None:
            todo = 'add a rule with artifact = "evaluation" if counts per class may leave'
            return Check(name, Found.NOTE, f"the policy does not permit it: {why}", todo)
        if (over := _over_total(outgoing.policy, spec, config)) is not None:
            return Check(name, Found.NOTE, over, "raise the limit if you agree to this")
        fewest = DEFAULT_MIN_COUNT if rule.min_count is None else rule.min_count
    labels = with_run_classes(own.labels, sites.classes, multi_label=sites.multi_label, renamed=own.renamed)
    classes, split, fewest = evaluated_images(labels, spec, client_id, fewest)
    numbers = tuple(int(number) for number in classes)
    left_out = [each for number, each in enumerate(sites.classes) if number not in numbers]
    without = f" without {', '.join(left_out)} (fewer than {fewest} training or test images)" if left_out else ""
    num_bytes = _most_bytes(numbers, len(split.train), len(split.test), fewest, config)
    what = (
        f"counts of {len(numbers)} of {len(sites.classes)} classes{without}, from about {len(split.test):,} "
        f"test images: at most {size(num_bytes)}"
    )
    return Check(name, Found.OK, what)


def _over_total(policy: Policy, spec: RunSpec, config: EvaluationConfig) -> str | None:
    """Return a message if this run alone asks for more evaluations than the policy permits in all runs, or None."""
    most = policy.max_evaluations_total
    num_due = sum(config.is_due(number, spec.num_rounds) for number in range(spec.num_rounds + 1))
    if most is None or num_due <= most:
        return None
    return f"the run asks for {plural(num_due, 'evaluation')}, max_evaluations_total allows {most} in all runs"


def _cross_site(spec: RunSpec, config: EvaluationConfig, outgoing: Outgoing | None) -> Iterator[Check]:
    """Report the classifier that this site sends to the other sites, and whether it evaluates theirs."""
    if config.site_config.cross_site is None:
        return
    with on_meta_device():
        width = build_encoder(spec.model.encoder, spec.data.channels, spec.data.image_size).feature_dim
    num_bytes = len(config.site_config.classes) * (width + 1) * 4 * 4 // 3
    kinds: tuple[tuple[SiteArtifact, str], ...] = (
        ("site-head", f"a classifier of at most {size(num_bytes)}, which every other site receives"),
        ("cross-evaluation", "counts of the other sites' classifiers, as many as of its own"),
    )
    for artifact, what in kinds:
        notice = None if outgoing is None else outgoing.notice
        rule, why = (None, "") if notice is None else evaluation_rule(notice, spec, spec.num_rounds, artifact)
        if notice is not None and rule is None:
            todo = f'add a rule with artifact = "{artifact}" if this may leave'
            yield Check(artifact, Found.NOTE, f"the policy does not permit it: {why}", todo)
        else:
            yield Check(artifact, Found.OK, what)


def _most_bytes(classes: tuple[int, ...], num_train: int, num_test: int, fewest: int, config: EvaluationConfig) -> int:
    """Return the size of the counts, if each of them had as many digits as the number of test images."""
    width = BINARY_COLUMNS if config.site_config.multi_label else len(classes)
    scores = ((num_test,) * config.site_config.score_bins,) * len(classes)
    tables = MeasureCounts(confusion=((num_test,) * width,) * len(classes), positives=scores, negatives=scores)
    counts = SiteCounts(
        classes=classes,
        min_count=fewest,
        num_train=num_train,
        num_test=num_test,
        measures=dict.fromkeys(config.site_measures, tables),
    )
    return len(counts.model_dump_json())


def _spread(num: int, most: int) -> list[int]:
    """Return at most `most` positions, spread evenly.

    >>> _spread(10, 4)
    [0, 2, 5, 7]
    """
    taken = min(num, most)
    return [position * num // taken for position in range(taken)]
