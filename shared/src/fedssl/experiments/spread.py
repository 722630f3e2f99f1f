"""Means over seeds, as `fedssl compare` and the web page show them. Without torch, which the page does not load."""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Spread:
    """A mean over seeds and their sample standard deviation, None for a single seed."""

    mean: float
    deviation: float | None


def spread(values: Sequence[float]) -> Spread | None:
    """Return mean and sample standard deviation; NaN if a value is not finite because an encoder diverged.

    >>> spread([1.0, 3.0])
    Spread(mean=2.0, deviation=1.4142135623730951)
    """
    if not values:
        return None
    if not all(map(math.isfinite, values)):
        return Spread(math.nan, math.nan if len(values) > 1 else None)
    return Spread(statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None)


def in_percent(share: float) -> str:
    return f"{100 * share:.2f}"


def best_round(evaluations: Mapping[int, Mapping[str, float | None]], measure: str) -> tuple[int, float] | None:
    """Return the trained round with the largest value, and the value; None if no round has a finite value.

    If several rounds are equal, it is the first. It is chosen on the test set, as in the papers: report it only next to
    the last.

    Args:
        evaluations: the measures by round; None and NaN stand for an encoder that diverged.
        measure: the name of one.

    >>> best_round({0: {"knn": 0.9}, 1: {"knn": 0.5}, 2: {"knn": 0.6}, 3: {"knn": None}}, "knn")
    (2, 0.6)
    """
    judged = [(at, values.get(measure)) for at, values in sorted(evaluations.items()) if at > 0]
    found = [(at, value) for at, value in judged if value is not None and math.isfinite(value)]
    return max(found, key=lambda each: each[1], default=None)


QUALITY: Mapping[str, Callable[[float], str]] = {
    "probe": in_percent,
    "knn": in_percent,
    "uniformity": "{:.3f}".format,
    "effective_rank": "{:.1f}".format,
}
"""How the measures of an encoder's quality are formatted."""


def mean_and_deviation(found: Spread | None, formatted: Callable[[float], str]) -> str:
    """Return a spread as text, `-` if there is none.

    >>> mean_and_deviation(spread([0.25, 0.75]), in_percent)
    '50.00 ± 35.36'
    """
    if found is None:
        return "-"
    if found.deviation is None:
        return formatted(found.mean)
    return f"{formatted(found.mean)} ± {formatted(found.deviation)}"
