"""The share of the gap between local-only and centralised training that a federation closes, with intervals."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from fedssl.experiments.summary import ACCURACIES, Line
from fedssl.experiments.variants import CENTRALISED, LOCAL_ONLY

CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean over seeds, and half the width of its 95 % confidence interval; None for a single seed.

    The interval is Student's: it assumes that the seeds' values are normally distributed. With three seeds it is 2.5
    times their sample standard deviation.
    """

    mean: float
    half_width: float | None


@dataclass(frozen=True, slots=True)
class Gap:
    """One measure of one variant next to the bounds, at the seeds that it has in common with them.

    Attributes:
        share: (variant - local-only) / (centralised - local-only), per seed; None without both bounds, or if
            centralised is not above local-only at each of these seeds: there is no gap then.
        step: the difference to the variant before it, per seed; None for the first.
    """

    variant: str
    measure: str
    accuracy: Interval
    share: Interval | None
    step: Interval | None


def interval(values: Sequence[float]) -> Interval:
    """Return the mean and Student's interval of at least one value; NaN if a value is not finite.

    >>> interval([1.0, 2.0, 3.0])
    Interval(mean=2.0, half_width=2.484137...)
    """
    mean = math.fsum(values) / len(values)
    if len(values) == 1:
        return Interval(mean, None)
    if not math.isfinite(mean):  # an encoder diverged, and statistics.stdev cannot compute with NaN
        return Interval(math.nan, math.nan)
    from scipy.stats import t

    quantile = float(t.ppf((1 + CONFIDENCE) / 2, len(values) - 1))
    return Interval(mean, quantile * statistics.stdev(values) / math.sqrt(len(values)))


def gaps(lines: Sequence[Line]) -> list[Gap]:
    """Return the gaps of all variants except the bounds, in their order, by measure."""
    found = []
    for measure in ACCURACIES:
        by_name = {line.variant: _by_seed(line, f"{measure}_last") for line in lines}
        low, high = by_name.pop(LOCAL_ONLY, {}), by_name.pop(CENTRALISED, {})
        before: dict[int, float] = {}
        for variant, values in by_name.items():
            if values:
                seeds = [seed for seed in values if seed in low and seed in high]
                is_open = all(high[seed] > low[seed] for seed in seeds)
                shares = [(values[seed] - low[seed]) / (high[seed] - low[seed]) for seed in seeds if is_open]
                steps = [value - before[seed] for seed, value in values.items() if seed in before]
                found.append(Gap(variant, measure, interval(list(values.values())), _some(shares), _some(steps)))
            before = values
    return found


def _by_seed(line: Line, column: str) -> dict[int, float]:
    return dict(zip(line.seeds, line.values.get(column, ()), strict=False))


def _some(values: Sequence[float]) -> Interval | None:
    return interval(values) if values else None
