"""The weights of updates in a mean, and the mean in the spec's arithmetic.

Everything that weights by a number that a client reports, and everything that averages tensors, uses this module.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence

from torch import Tensor

from fedssl.aggregation import capped_at_median, capped_weights, weighted_mean
from fedssl.aggregation.fixed_point import COUNTED_BITS, EQUAL_BITS
from fedssl.artifacts.tensors import Tensors
from fedssl.methods.api import Context, MeanInputs, Update


def update_weights(
    updates: Sequence[Update], ctx: Context, weight_of: Callable[[int], int] = lambda num_examples: num_examples
) -> Sequence[float]:
    """Return a weight for each update, from its number of images, within the spec's `robustness`."""
    robustness = ctx.spec.robustness
    numbers = [update.num_examples for update in updates]
    if robustness.max_examples is not None:
        numbers = [min(number, robustness.max_examples) for number in numbers]
    if robustness.max_examples_ratio is not None:
        numbers = capped_at_median(numbers, robustness.max_examples_ratio)
    weights = [weight_of(number) for number in numbers]
    max_share = robustness.max_weight_share
    return weights if max_share is None else capped_weights(weights, max_share)


def has_own_weights(ctx: Context) -> bool:
    """Return whether each update's weight depends only on its own number of images."""
    robustness = ctx.spec.robustness
    return robustness.max_examples_ratio is None and robustness.max_weight_share is None


def mean_of(
    tensors: Iterable[Mapping[str, Tensor]], weights: Sequence[float], base: Mapping[str, Tensor], ctx: Context
) -> Tensors:
    """Return the weighted mean of the clients' tensors, in the arithmetic of the spec.

    `weights` are numbers of images or batches. `base` has the tensors that were broadcast.
    """
    if not is_fixed(ctx):
        return weighted_mean(tensors, weights)
    return ctx.fixed_mean(MeanInputs(tensors, weights, base, COUNTED_BITS))


def equal_mean_of(
    tensors: Iterable[Mapping[str, Tensor]], num_updates: int, base: Mapping[str, Tensor] | None, ctx: Context
) -> Tensors:
    """Return the mean of the clients' tensors with equal weights, in the arithmetic of the spec.

    `base` is None if the clients send differences.
    """
    ones = [1] * num_updates
    if not is_fixed(ctx):
        return weighted_mean(tensors, ones)
    return ctx.fixed_mean(MeanInputs(tensors, ones, base, EQUAL_BITS))


def sum_of(tensors: Iterable[Mapping[str, Tensor]], num_updates: int, ctx: Context, *, fraction_bits: int) -> Tensors:
    """Return the sum of the clients' float64 tensors, in a spec with sums of integers: each is rounded to a multiple of
    2^-fraction_bits, and the sum is exact below 2^(53 - fraction_bits)."""
    means = ctx.fixed_mean(MeanInputs(tensors, [1] * num_updates, None, fraction_bits))
    scale = 2.0**fraction_bits
    return {name: (mean * num_updates * scale).round() / scale for name, mean in means.items()}


def is_fixed(ctx: Context) -> bool:
    """Return whether the spec asks for sums of integers."""
    return ctx.spec.aggregation.arithmetic == "fixed"
