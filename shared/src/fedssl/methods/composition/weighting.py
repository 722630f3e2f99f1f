"""The weights of updates in a mean. Everything that weights by a number that a client reports takes them from here."""

from collections.abc import Callable, Sequence

from fedssl.aggregation import capped_at_median, capped_weights
from fedssl.methods.api import Context, Update


def update_weights(
    updates: Sequence[Update], ctx: Context, weight_of: Callable[[int], int] = lambda num_examples: num_examples
) -> Sequence[float]:
    """Return a weight for each update, from its number of images, within the spec's `robustness`."""
    robustness = ctx.spec.robustness
    numbers = [update.num_examples for update in updates]
    if robustness.max_examples_ratio is not None:
        numbers = capped_at_median(numbers, robustness.max_examples_ratio)
    weights = [weight_of(number) for number in numbers]
    max_share = robustness.max_weight_share
    return weights if max_share is None else capped_weights(weights, max_share)
