"""Finds the updates with a value that does not fit the fixed-point scale, so that a round can do without them."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from fedssl.aggregation import OutOfRange
from fedssl.aggregation.fixed_point import FixedPointSum, whole_weights
from fedssl.artifacts.tensors import Tensors
from fedssl.methods import BoundMethod
from fedssl.methods.api import Context, MeanInputs, ServerState, Update


def out_of_range(bound: BoundMethod, state: ServerState, updates: Sequence[Update], ctx: Context) -> dict[str, str]:
    """Return the clients whose update does not fit into words of 64 bits, each with the reason.

    `state`: the method's own, before the round. Each update is read once for each mean of the method.
    """
    found = _Misfits()
    bound.server.aggregate_sums(state, updates, replace(ctx, fixed_mean=found))
    return {updates[place].client_id: why for place, why in sorted(found.reasons.items())}


class _Misfits:
    """Converts the updates of each mean without adding them up. `reasons`: why some do not fit, by their place."""

    def __init__(self) -> None:
        self.reasons: dict[int, str] = {}

    def __call__(self, inputs: MeanInputs) -> Tensors:
        numbers, zeros = whole_weights(inputs.weights), dict[str, Tensor]()
        for place, update in enumerate(inputs.updates):
            words = FixedPointSum(inputs.base, fraction_bits=inputs.fraction_bits, num_clients=len(numbers))
            try:
                words.add(update, numbers[place], inputs.factor)
            except OutOfRange as error:
                self.reasons.setdefault(place, str(error))
            zeros = zeros or {name: torch.zeros_like(update[name]) for name in sorted(update)}
            del update, words  # before the next one is opened: an update may be as large as memory allows
        return zeros
