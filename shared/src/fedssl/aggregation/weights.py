"""Weights of a mean, with a bound on each of them."""

import math
import statistics
from collections.abc import Sequence

from fedssl.aggregation.mean import AggregationError, checked_weights


def capped_weights(weights: Sequence[float], max_share: float) -> list[float]:
    """Return the weights, with those reduced whose share of the sum would be larger than `max_share`.

        w_k' = min(w_k, s sum_j w_j')   for every k

    The c largest weights become s T with T = R / (1 - c s), where R is the sum of the others and c is the smallest
    number with which no share is larger than s. The others stay as they are, so they keep their proportions, and gain
    what the largest lose. If no weight is too large, all are returned unchanged.

    If there are too few for any solution (n s <= 1), the smallest possible largest share is 1 / n: all weights are 1.

    Args:
        weights: a positive, finite number for each update.
        max_share: s, larger than 0 and at most 1.

    Returns:
        A weight for each update, in the same order.

    Raises:
        AggregationError: the weights or the share do not fit.

    Example:
        >>> capped_weights([100, 10, 10], 0.5)  # R = 20, c = 1, T = 40
        [20.0, 10.0, 10.0]
        >>> capped_weights([100, 10], 0.25)
        [1.0, 1.0]

    Reference: fedssl's own rule, worked out above; the weights are those of FedAvg (McMahan et al. 2017), Algorithm 1.
    """
    numbers = checked_weights(weights)
    if not 0 < max_share <= 1:
        raise AggregationError(f"max_share must be larger than 0 and at most 1, not {max_share}")
    if len(numbers) * max_share <= 1:
        return [1.0] * len(numbers)
    descending = sorted(numbers, reverse=True)
    for num_capped, largest in enumerate(descending):
        free = 1 - num_capped * max_share
        if free <= 0:
            break
        cap = max_share * (sum(descending[num_capped:]) / free)
        if largest <= cap:
            return numbers if num_capped == 0 else [min(number, cap) for number in numbers]
    return [1.0] * len(numbers)  # only rounding leads here: the shares are as good as equal


def capped_at_median(numbers: Sequence[int], ratio: float) -> list[int]:
    """Return the numbers of images, each at most `ratio` times their median, rounded down, and at least 1.

    Unlike a bound on shares, this one does not depend on what the largest claim: while less than half of the clients
    lie, the median lies between honest numbers.

    Args:
        numbers: the number of images of each update, positive.
        ratio: at least 1.

    Returns:
        A number for each update, in the same order.

    Raises:
        AggregationError: the numbers or the ratio do not fit.

    Example:
        >>> capped_at_median([100, 120, 10_000_000], 2.5)
        [100, 120, 300]

    Reference: fedssl's own rule; the numbers are those of FedAvg (McMahan et al. 2017), Algorithm 1.
    """
    checked_weights(numbers)
    if not (ratio >= 1 and math.isfinite(ratio)):
        raise AggregationError(f"ratio must be finite and at least 1, not {ratio}")
    most = max(1, math.floor(ratio * statistics.median(numbers)))
    return [min(number, most) for number in numbers]
