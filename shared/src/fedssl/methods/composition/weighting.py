"""The weights of updates in a mean. Everything that weights by a number that a client reports takes them from here."""

from collections.abc import Callable, Sequence

from fedssl.aggregation import capped_weights
from fedssl.methods.api import Context, Update


def update_weights(
    updates: Sequence[Update], ctx: Context, weight_of: Callable[[int], int] = lambda num_examples: num_examples
) -> Sequence[float]:
    """Return a weight for each update, from its number of images, within the spec's `robustness.max_weight_share`."""
    weights = [weight_of(update.num_examples) for update in updates]
    max_share = ctx.spec.robustness.max_weight_share
    return weights if max_share is None else capped_weights(weights, max_share)
