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
