"""Reducers that a minority of dishonest clients cannot move arbitrarily far, by the config's name."""

from collections.abc import Mapping, Sequence

from torch import Tensor

from fedssl.aggregation import coordinate_median, geometric_median, multi_krum, trimmed_mean
from fedssl.artifacts.tensors import Tensors
from fedssl.methods.api import Context, Metrics, ServerState, Update
from fedssl.methods.composition.server import Reducer
from fedssl.methods.composition.weighting import update_weights
from fedssl.protocol.methods.reducers import (
    GeometricMedianConfig,
    MedianConfig,
    MultiKrumConfig,
    TrimmedMeanConfig,
)


class _Updates(Sequence[Mapping[str, Tensor]]):
    """The tensors of updates, opened each time an update is read."""

    def __init__(self, updates: Sequence[Update]) -> None:
        self._updates = updates

    def __len__(self) -> int:
        return len(self._updates)

    def __getitem__(self, place):  # type: ignore[no-untyped-def]  # slices are not used
        return self._updates[place].load()


def median(config: MedianConfig) -> Reducer:
    """Return the reducer that takes the median of each coordinate."""

    def reduce(updates: Sequence[Update], state: ServerState, ctx: Context) -> tuple[Tensors, Metrics]:
        return coordinate_median(_Updates(updates)), {}

    return Reducer(reduce)


def trimmed(config: TrimmedMeanConfig) -> Reducer:
    """Return the reducer that takes the mean of each coordinate without its extremes."""

    def reduce(updates: Sequence[Update], state: ServerState, ctx: Context) -> tuple[Tensors, Metrics]:
        return trimmed_mean(_Updates(updates), config.num_trimmed), {}

    return Reducer(reduce)


def krum(config: MultiKrumConfig) -> Reducer:
    """Return the reducer that takes the mean of the updates nearest to their neighbours."""

    def reduce(updates: Sequence[Update], state: ServerState, ctx: Context) -> tuple[Tensors, Metrics]:
        num_selected = config.num_selected or len(updates) - config.num_byzantine
        return multi_krum(_Updates(updates), config.num_byzantine, num_selected), {}

    return Reducer(reduce)


def geometric(config: GeometricMedianConfig) -> Reducer:
    """Return the reducer that takes the geometric median of the updates."""

    def reduce(updates: Sequence[Update], state: ServerState, ctx: Context) -> tuple[Tensors, Metrics]:
        weights = update_weights(updates, ctx)
        return geometric_median(_Updates(updates), weights, config.num_iterations, config.smoothing), {}

    return Reducer(reduce)
