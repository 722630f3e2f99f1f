"""Reducers that combine the clients' weights, by the config's name."""

import math
from collections.abc import Callable, Sequence

from fedssl.aggregation import (
    efficient_unified_aggregation,
    is_batch_norm_buffer,
    layerwise_divergence_aware,
)
from fedssl.aggregation.fixed_point import COUNTED_BITS, EQUAL_BITS
from fedssl.aggregation.layerwise import capped_cosines
from fedssl.aggregation.prefix_mean import PrefixMean
from fedssl.artifacts.tensors import Tensors
from fedssl.methods.api import Context, MeanInputs, Metrics, ServerState, Update
from fedssl.methods.composition.server import Reducer
from fedssl.methods.composition.weighting import equal_mean_of, has_own_weights, is_fixed, update_weights
from fedssl.protocol.methods.reducers import EUAConfig, LDAWAConfig, MeanConfig, NoReducerConfig

_BY_BATCHES = MeanConfig(weighting="batches")


def eua(config: EUAConfig) -> Reducer:
    """Return FedU2's reducer: a step along the clients' shortest common direction (Liao et al. 2024; `FedU2Config`)."""

    def reduce(updates: Sequence[Update], state: ServerState, ctx: Context) -> tuple[Tensors, Metrics]:
        tensors = [update.load() for update in updates]
        previous = {name: state[name] for name in tensors[0]}
        weights = _counts(_BY_BATCHES, updates, ctx)
        return efficient_unified_aggregation(tensors, previous, weights, config.server_learning_rate), {}

    return Reducer(reduce)


def ldawa(config: LDAWAConfig) -> Reducer:
    """Return L-DAWA's reducer (Rehman et al. 2023), which scales each tensor by its cosine to the global one."""

    def reduce(updates: Sequence[Update], state: ServerState, ctx: Context) -> tuple[Tensors, Metrics]:
        if ctx.round_number <= config.num_plain_rounds:
            return equal_mean_of((update.load() for update in updates), len(updates), state, ctx), {}
        previous, loaded = {name: state[name] for name in updates[0].load()}, (update.load() for update in updates)
        if not is_fixed(ctx):
            return layerwise_divergence_aware(loaded, previous, _plain(config)), {}
        ones, factor = [1] * len(updates), capped_cosines(previous, _plain(config))
        return ctx.fixed_mean(MeanInputs(loaded, ones, previous, EQUAL_BITS, factor)), {}

    def weights(updates: Sequence[Update], ctx: Context) -> Sequence[float] | None:
        return [1] * len(updates) if ctx.round_number <= config.num_plain_rounds else None

    return Reducer(reduce, weights=weights)


def _plain(config: LDAWAConfig) -> Callable[[str], bool]:
    return is_batch_norm_buffer if config.batch_norm == "plain" else lambda name: False


def mean(config: MeanConfig) -> Reducer:
    """Return FedAvg's reducer (McMahan et al. 2017): the mean, weighted by images, by batches, or equally."""
    is_uniform = config.weighting == "uniform"

    def weights(updates: Sequence[Update], ctx: Context) -> Sequence[float]:
        return [1] * len(updates) if is_uniform else _counts(config, updates, ctx)

    def begin(updates: Sequence[Update], ctx: Context) -> None:
        if ctx.prefix_mean is not None and has_own_weights(ctx) and not is_fixed(ctx):
            ctx.prefix_mean.extend([update.load for update in updates], weights(updates, ctx))

    def reduce(updates: Sequence[Update], state: ServerState, ctx: Context) -> tuple[Tensors, Metrics]:
        if not is_fixed(ctx):
            prefix_mean = PrefixMean() if ctx.prefix_mean is None else ctx.prefix_mean
            return prefix_mean.of([update.load for update in updates], weights(updates, ctx)), {}
        loaded, bits = (update.load() for update in updates), EQUAL_BITS if is_uniform else COUNTED_BITS
        return ctx.fixed_mean(MeanInputs(loaded, weights(updates, ctx), state, bits)), {}

    return Reducer(reduce, declares=None, begin=begin, weights=weights)


def none(config: NoReducerConfig) -> Reducer:
    """Return the reducer that combines nothing: the global model does not change."""

    def reduce(updates: Sequence[Update], state: ServerState, ctx: Context) -> tuple[Tensors, Metrics]:
        return {}, {}

    return Reducer(reduce, declares="keep")


def _counts(config: MeanConfig, updates: Sequence[Update], ctx: Context) -> Sequence[float]:
    """Return the weights by numbers of images or batches."""
    if config.weighting == "examples":
        return update_weights(updates, ctx)
    training = ctx.spec.training
    rounding = math.floor if training.drop_last else math.ceil
    return update_weights(updates, ctx, lambda num_examples: max(1, rounding(num_examples / training.batch_size)))
