"""Accuracies from the counts that sites send, per site, pooled, and of the worst site. Needs no torch.

With one label per image, and R_c, P_c the shares of class c's images and of c's predictions that are right:
accuracy is the share of all images that are right; balanced accuracy the mean of R_c; macro F1 the mean of
2 R_c P_c / (R_c + P_c), 0 for a class that is never right; AUROC the mean over classes of the probability that an image
of the class has a higher score for it than another image has, where equal bins count one half.

With several labels per image, accuracy is the share of all pairs of image and label that are right; balanced accuracy
the mean over labels of the mean of sensitivity and specificity; macro F1 and AUROC are as above.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from fedssl.protocol.evaluation import SiteMeasure, SitesConfig
from fedssl.protocol.site_evaluation import BINARY_COLUMNS, MeasureCounts, SiteCounts

METRICS = ("accuracy", "balanced_accuracy", "macro_f1", "auroc")

Results = dict[str, float]
"""Numbers by name, such as `probe/accuracy`. NaN if a number is not defined, or if the encoder's training diverged."""


@dataclass(frozen=True, slots=True)
class WorstSite:
    """The site with the lowest value of a result."""

    client_id: str
    value: float


@dataclass(frozen=True, slots=True)
class SiteSummary:
    """The results of all sites that have answered, by name.

    Attributes:
        by_site: the results of each site.
        pooled: the results of the sums of all sites' counts.
        mean: the mean over the sites.
        worst: the worst site; a site whose number is NaN is worse than all others.
    """

    by_site: dict[str, Results] = field(default_factory=dict)
    pooled: Results = field(default_factory=dict)
    mean: Results = field(default_factory=dict)
    worst: dict[str, WorstSite] = field(default_factory=dict)


def summarise_sites(
    counts: Mapping[str, SiteCounts], config: SitesConfig, measures: Sequence[SiteMeasure]
) -> SiteSummary:
    """Return the results of sites by name. Equal counts give equal results, in whatever order they come."""
    if not counts:
        return SiteSummary()
    names = sorted(counts)
    by_site = {name: site_results(counts[name], config, measures) for name in names}
    pooled = site_results(pooled_counts([counts[name] for name in names], config, measures), config, measures)
    mean, worst = {}, {}
    for result in pooled:
        values = {name: by_site[name][result] for name in names}
        mean[result] = math.fsum(values.values()) / len(values)
        lowest = min(values, key=lambda name: -math.inf if math.isnan(values[name]) else values[name])
        worst[result] = WorstSite(lowest, values[lowest])
    return SiteSummary(by_site, pooled, mean, worst)


def site_results(counts: SiteCounts, config: SitesConfig, measures: Sequence[SiteMeasure]) -> Results:
    """Return the results of one site, or of the counts of several."""
    found: Results = {}
    for measure in measures:
        own = counts.measures.get(measure)
        values = dict.fromkeys(METRICS, math.nan) if own is None else measure_results(own, config)
        found |= {f"{measure}/{name}": value for name, value in values.items()}
    return found


def measure_results(counts: MeasureCounts, config: SitesConfig) -> Results:
    """Return the results of one classifier by the names of `METRICS`."""
    auroc = _mean(_auroc(*pair) for pair in zip(counts.positives, counts.negatives, strict=True))
    if config.multi_label:
        rows = [row for row in counts.confusion if sum(row)]  # a label that no site has evaluated has no results
        right, total = sum(row[0] + row[3] for row in rows), sum(map(sum, rows))
        balanced = _mean((_share(tp, tp + fn) + _share(tn, tn + fp)) / 2 for tn, fn, fp, tp in rows)
        f1 = _mean(_f1(tp, tp + fn, tp + fp) for tn, fn, fp, tp in rows)
        return dict(zip(METRICS, (_share(right, total), balanced, f1, auroc), strict=True))
    table = counts.confusion
    present = [number for number, row in enumerate(table) if sum(row)]
    predicted = [sum(column) for column in zip(*table, strict=True)]
    right, total = sum(table[c][c] for c in present), sum(map(sum, table))
    balanced = _mean(_share(table[c][c], sum(table[c])) for c in present)
    f1 = _mean(_f1(table[c][c], sum(table[c]), predicted[c]) for c in present)
    return dict(zip(METRICS, (_share(right, total), balanced, f1, auroc), strict=True))


def pooled_counts(sites: Iterable[SiteCounts], config: SitesConfig, measures: Sequence[SiteMeasure]) -> SiteCounts:
    """Return the sums of the sites' counts over all classes of the run. A site whose encoder diverged adds nothing."""
    sites = list(sites)
    every = range(len(config.classes))
    width = BINARY_COLUMNS if config.multi_label else len(config.classes)
    sums = {}
    for measure in measures:
        if not any(measure in site.measures for site in sites):
            continue
        confusion = [[0] * width for _ in every]
        positives, negatives = ([[0] * config.score_bins for _ in every] for _ in range(2))
        for site in sites:
            if (own := site.measures.get(measure)) is None:
                continue
            columns = range(width) if config.multi_label else site.classes
            for row, number in enumerate(site.classes):
                _add(confusion[number], columns, own.confusion[row])
                _add(positives[number], range(config.score_bins), own.positives[row])
                _add(negatives[number], range(config.score_bins), own.negatives[row])
        sums[measure] = MeasureCounts.model_validate(
            {"confusion": confusion, "positives": positives, "negatives": negatives}
        )
    return SiteCounts(
        classes=tuple(every),
        min_count=min((site.min_count for site in sites), default=config.min_count),
        num_train=sum(site.num_train for site in sites),
        num_test=sum(site.num_test for site in sites),
        measures=sums,
    )


def unusable_counts(counts: SiteCounts, config: SitesConfig, measures: Sequence[SiteMeasure]) -> str | None:
    """Return why these cannot be a site's counts for this run, or None if they can."""
    if counts.classes and counts.classes[-1] >= len(config.classes):
        return f"there is a class {counts.classes[-1]}, but the run has {len(config.classes)}, numbered from 0"
    if counts.min_count < config.min_count:
        return f"min_count is {counts.min_count}, and the run's is {config.min_count}"
    if counts.measures and set(counts.measures) != set(measures):
        return f"the measures are {', '.join(counts.measures)}, and the run's are {', '.join(measures)}"
    width = BINARY_COLUMNS if config.multi_label else len(counts.classes)
    for name, own in counts.measures.items():
        if any(len(row) != width for row in own.confusion):
            return f"{name}: rows of the confusion table need {width} numbers"
        if any(len(row) != config.score_bins for row in own.positives):
            return f"{name}: rows of scores need {config.score_bins} bins"
        if (why := _contradiction(own, config, counts.num_test)) is not None:
            return f"{name}: {why}"
    return None


def _contradiction(counts: MeasureCounts, config: SitesConfig, num_test: int) -> str | None:
    """Return what does not add up, or None. Both tables must count the same test images."""
    for row, confusion in enumerate(counts.confusion):
        has = confusion[1] + confusion[3] if config.multi_label else sum(confusion)
        if has != sum(counts.positives[row]) or has + sum(counts.negatives[row]) != num_test:
            return f"row {row} of the confusion table and of the scores do not count the same {num_test} images"
    return None


def _add(row: list[int], columns: Iterable[int], numbers: Sequence[int]) -> None:
    for column, number in zip(columns, numbers, strict=True):
        row[column] += number


def _auroc(positives: Sequence[int], negatives: Sequence[int]) -> float | None:
    """Return the area under the curve of one class, or None if it has no positive or no negative images."""
    num_positives, num_negatives = sum(positives), sum(negatives)
    if not num_positives or not num_negatives:
        return None
    twice, below = 0, 0
    for high, low in zip(positives, negatives, strict=True):
        twice += high * (2 * below + low)
        below += low
    return twice / (2 * num_positives * num_negatives)


def _mean(values: Iterable[float | None]) -> float:
    known = [value for value in values if value is not None]
    return math.fsum(known) / len(known) if known else math.nan


def _share(part: int, whole: int) -> float:
    return part / whole if whole else math.nan


def _f1(right: int, true: int, predicted: int) -> float:
    return 2 * right / (true + predicted) if true + predicted else math.nan
