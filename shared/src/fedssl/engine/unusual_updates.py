"""Finds updates that are unusual: against the other updates of the round, and against the same client's earlier ones.

Norms and numbers of images are compared by their logarithm, with the modified z-score (Iglewicz and Hoaglin 1993):

    z = (log x - median) / max(1.4826 MAD, log(factor) / 6),   unusual if z > 6

so that x is unusual only if it is both far outside the others' spread and more than `factor` times their median. Only
large values are unusual. The factors:

                     against the others   against 1 or 2 others   against the client's last 5 to 20 rounds
    a norm           10                   1000                    10
    num_examples     100                  1000                    2 (from the first round on)

A client with more images takes more steps, so the factor of its norm against the others grows with its images over
their median.

A direction is unusual if its cosine to the mean of the others lies below -0.6, and more than 6 max(1.4826 MAD, 0.1)
below the median of at least 3 others; or if its cosine to the mean of all lies below -0.4, and as far below those of
the client's own rounds. In both cases the round's median must be positive. With shares w, norms n and cosines c to the
mean m, |m| = sum_j w_j n_j c_j, and the mean of the others is m - w_k u_k up to its length. If the round's step is not
a weighted mean of the updates, they have no shares, and their cosines to the step are compared with the same limits.
Clients with few, one-sided images often have negative cosines: down to -0.3 to the mean of all was measured. If a norm
or a number of images is unusual, one update dominates the mean, and cosines to it mean nothing: they are not compared.

Two clients that differ cannot be judged by each other, and a majority that lies is not unusual.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from fedssl.methods.api import Metrics
from fedssl.protocol.measures import COSINE, NORMS, UPDATE_NORM, WEIGHT_SHARE

NUM_EXAMPLES = "num_examples"
"""The name of a client's number of images among its numbers."""

MOST_ROUNDS = 20
"""Number of a client's earlier rounds that are compared."""

_MOST_DEVIATIONS = 6.0
_CONSISTENT = 1.4826  # scales the MAD of normal data to its standard deviation
_FEWEST_OTHERS, _FEWEST_ROUNDS = 3, 5
_NORM_FACTOR, _EXAMPLES_FACTOR, _FEW_FACTOR, _OWN_EXAMPLES_FACTOR = 10.0, 100.0, 1000.0, 2.0
_OPPOSED_TO_OTHERS, _OPPOSED_TO_MEAN, _COSINE_SPREAD = -0.6, -0.4, 0.1


@dataclass(frozen=True, slots=True)
class UnusualUpdate:
    """One client's update, and what is unusual about it, in words and numbers."""

    client_id: str
    findings: Sequence[str]
    numbers: Metrics = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.client_id}: {'; '.join(self.findings)}"


def find_unusual(
    numbers: Mapping[str, Mapping[str, float]], history: Mapping[str, Sequence[Mapping[str, float]]]
) -> list[UnusualUpdate]:
    """Return the unusual updates of a round, in client-id order.

    Args:
        numbers: the metrics that the coordinator measured of each update, and its `num_examples`.
        history: the same of each client's earlier rounds in the run, in any order.
    """
    findings = {client: _large(client, numbers, history.get(client, ())) for client in sorted(numbers)}
    if not any(findings.values()):
        findings = {client: _opposed(client, numbers, history.get(client, ())) for client in findings}
    return [UnusualUpdate(client, found, dict(numbers[client])) for client, found in findings.items() if found]


def _large(
    client: str, numbers: Mapping[str, Mapping[str, float]], history: Sequence[Mapping[str, float]]
) -> list[str]:
    own, found = numbers[client], []
    others = [each for name, each in numbers.items() if name != client]
    more_images = _ratio(own.get(NUM_EXAMPLES), _values(others, NUM_EXAMPLES))
    for name in (*NORMS, NUM_EXAMPLES):
        if name not in own:
            continue
        of_others, earlier = _values(others, name), _values(history, name)
        if len(of_others) < _FEWEST_OTHERS:
            factor = _FEW_FACTOR
        else:
            factor = _EXAMPLES_FACTOR if name == NUM_EXAMPLES else _NORM_FACTOR
        allowance = 1.0 if name == NUM_EXAMPLES else max(1.0, more_images)
        if _is_large(own[name], of_others, factor * allowance):
            found.append(_words(name, own[name], of_others, "the others"))
        least, factor = (1, _OWN_EXAMPLES_FACTOR) if name == NUM_EXAMPLES else (_FEWEST_ROUNDS, _NORM_FACTOR)
        if len(earlier) >= least and _is_large(own[name], earlier, factor):
            found.append(_words(name, own[name], earlier, "its earlier rounds"))
    return found


def _opposed(
    client: str, numbers: Mapping[str, Mapping[str, float]], history: Sequence[Mapping[str, float]]
) -> list[str]:
    to_mean = {name: each[COSINE] for name, each in numbers.items() if COSINE in each}
    if client not in to_mean or statistics.median(to_mean.values()) <= 0:
        return []
    to_others, found = _cosines_to_the_others(numbers), []
    others = [cosine for name, cosine in to_others.items() if name != client]
    if len(others) >= _FEWEST_OTHERS and _is_opposed(to_others[client], others, _OPPOSED_TO_OTHERS):
        median = statistics.median(others)
        what = "its cosine to the others' mean" if WEIGHT_SHARE in numbers[client] else f"its {COSINE}"
        found.append(f"{what} is {to_others[client]:.3g}, and the median of the others is {median:.3g}")
    earlier = [each[COSINE] for each in history if COSINE in each]
    if len(earlier) >= _FEWEST_ROUNDS and _is_opposed(to_mean[client], earlier, _OPPOSED_TO_MEAN):
        median = statistics.median(earlier)
        found.append(f"{COSINE} {to_mean[client]:.3g}, and the median of its earlier rounds is {median:.3g}")
    return found


def _is_opposed(value: float, values: Sequence[float], limit: float) -> bool:
    scale = max(_CONSISTENT * _spread(values), _COSINE_SPREAD)
    return value < limit and statistics.median(values) - value > _MOST_DEVIATIONS * scale


def _cosines_to_the_others(numbers: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Return each client's cosine to the mean of the others, from those to the mean of all.

    Without shares, it returns the latter.
    """
    known = {name: each for name, each in numbers.items() if COSINE in each and UPDATE_NORM in each}
    length = sum(each.get(WEIGHT_SHARE, 0.0) * each[UPDATE_NORM] * each[COSINE] for each in known.values())
    found = {}
    for name, each in known.items():
        own, cosine = each.get(WEIGHT_SHARE, 0.0) * each[UPDATE_NORM], each[COSINE]
        square = length**2 - 2 * own * length * cosine + own**2
        found[name] = (length * cosine - own) / math.sqrt(square) if length > 0 and square > 0 else cosine
    return found


def _values(numbers: Sequence[Mapping[str, float]], name: str) -> list[float]:
    """Return the values that have a logarithm."""
    return [each[name] for each in numbers if each.get(name, 0.0) > 0]


def _is_large(value: float, values: Sequence[float], factor: float) -> bool:
    if not values or value <= 0:
        return False
    logarithms = [math.log(each) for each in values]
    scale = max(_CONSISTENT * _spread(logarithms), math.log(factor) / _MOST_DEVIATIONS)
    return (math.log(value) - statistics.median(logarithms)) / scale > _MOST_DEVIATIONS


def _spread(values: Sequence[float]) -> float:
    """Return the median absolute deviation."""
    median = statistics.median(values)
    return statistics.median(abs(value - median) for value in values)


def _ratio(value: float | None, values: Sequence[float]) -> float:
    return value / statistics.median(values) if value and values else 1.0


def _words(name: str, value: float, values: Sequence[float], whose: str) -> str:
    median = statistics.median(values)
    return f"{name} {value:.4g} is {value / median:.3g} times the median of {whose} ({median:.4g})"
