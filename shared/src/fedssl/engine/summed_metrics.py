"""The numbers of a secure round's training: means and counts over the clients, which are words of the same masked sum.

Each client adds `NUM_WORDS` integers before the words of its update: its number of images, and 1 if its update was
clipped; for each metric 1 if it has none, or its value times its number of images on a public scale; and for each
threshold of `spec.watch` 1 if it crossed it. So the coordinator learns no number of a single client.
"""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from fedssl.aggregation.fixed_point import COUNTED_BITS, largest_word
from fedssl.engine.unusual_updates import NUM_EXAMPLES
from fedssl.evaluation.monitoring import (
    CLIPPED,
    DIVERGENCE,
    EFFECTIVE_RANK,
    EMBEDDING_STD,
    FEATURE_STD,
    LOSS,
    crossed_name,
    find_collapse_alerts,
)
from fedssl.methods.api import Context, Metrics

MEANS = (LOSS, EFFECTIVE_RANK, FEATURE_STD, EMBEDDING_STD, DIVERGENCE)
"""The metrics whose mean a secure round has. The others of a method stay with the clients."""

WATCHED = MEANS[1:]
"""The metrics with thresholds: the clients that crossed them are counted."""

NUM_WORDS = 2 + 2 * len(MEANS) + len(WATCHED)


def metric_words(num_examples: int, metrics: Metrics, num_clients: int, ctx: Context, *, is_clipped: bool) -> Tensor:
    """Return the words of one client's numbers, int64 (`NUM_WORDS`,).

    A metric that is not finite, or does not fit into its word, counts as missing.

    Args:
        num_examples: the client's number of images.
        metrics: what its training measured.
        num_clients: of the round's cohort.
        ctx: of the round.
        is_clipped: the update was beyond a norm of the spec's `robustness`.
    """
    crossed = {alert.name for alert in find_collapse_alerts(ctx.spec.watch, ctx.round_number, {"": metrics})}
    words = [num_examples, int(is_clipped)]
    for name in MEANS:
        word = _word(metrics.get(name, math.nan), num_examples)
        words += [1, 0] if word is None or abs(word) > largest_word(num_clients) else [0, word]
    return torch.tensor(words + [int(name in crossed) for name in WATCHED])


def summed_metrics(words: Tensor, num_clients: int) -> Metrics:
    """Return the means over all images of `num_clients` clients, and their counts, from the sum of `metric_words`.

    The mean of a metric is left out if any client lacks it: the others' weights would disclose that client's number of
    images. A count that is not possible is left out too, because some client sent wrong words.
    """
    num_examples, num_clipped, *rest = words.tolist()
    if num_examples < num_clients:
        return {}
    found = {NUM_EXAMPLES: float(num_examples)}
    for place, name in enumerate(MEANS):
        num_missing, total = rest[2 * place : 2 * place + 2]
        if num_missing == 0:
            found[name] = _mean(total, num_examples)
    counts = {CLIPPED: num_clipped}
    counts |= {crossed_name(name): num for name, num in zip(WATCHED, rest[2 * len(MEANS) :], strict=True)}
    return found | {name: float(number) for name, number in counts.items() if 0 < number <= num_clients}


def fixed_mean(values: Sequence[float], weights: Sequence[int]) -> float:
    """Return the mean of metrics in the arithmetic of a secure round, in which their order changes no bit.

        2^-f / W sum_k rint(v_k w_k 2^f)

    Example:
        >>> fixed_mean([1.0, 3.0], [3, 1])
        1.5
    """
    return _mean(sum(_word(value, weight) or 0 for value, weight in zip(values, weights, strict=True)), sum(weights))


def mean_loss(losses: Mapping[str, float], num_examples: Mapping[str, int]) -> Metrics:
    """Return the mean loss of a round of plain fixed point, or nothing if no client has one."""
    if not losses:
        return {}
    return {LOSS: fixed_mean(list(losses.values()), [num_examples[name] for name in losses])}


def _word(value: float, weight: int) -> int | None:
    return round(math.ldexp(value * weight, COUNTED_BITS)) if math.isfinite(value) else None


def _mean(total: int, weight: int) -> float:
    return math.ldexp(total / weight, -COUNTED_BITS)
