"""How the coordinator combines the clients' weights, by the config's name."""

import math
from collections.abc import Sequence

from fedssl.aggregation import weighted_mean
from fedssl.artifacts.tensors import Tensors
from fedssl.methods.api import Context, Metrics, ServerState, Update
from fedssl.methods.composition import Reducer
from fedssl.protocol.methods.reducers import MeanConfig


def mean(config: MeanConfig) -> Reducer:
    """FedAvg (McMahan et al. 2017): the mean, weighted by images, by batches, or not at all."""

    def reduce(updates: Sequence[Update], state: ServerState, ctx: Context) -> tuple[Tensors, Metrics]:
        weights = [_weight(config, update.num_examples, ctx) for update in updates]
        return weighted_mean((update.load() for update in updates), weights), {}

    return reduce


def _weight(config: MeanConfig, num_examples: int, ctx: Context) -> int:
    if config.weighting == "examples":
        return num_examples
    if config.weighting == "uniform":
        return 1
    training = ctx.spec.training
    rounding = math.floor if training.drop_last else math.ceil
    return max(1, rounding(num_examples / training.batch_size))
