"""Words of 32 bits for the matrices of a fixed-point sum (`aggregation.matrix_bits = 32`).

Their scales follow from the broadcast and from the total weight of the round before, which the coordinator keeps next
to the method's state. So the first round, and each round after one without new weights, has words of 64 bits: a round
whose values did not fit is followed by one with room for them.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from fedssl.aggregation.fixed_point import COUNTED_BITS, NarrowWords, TotalBits
from fedssl.artifacts.tensors import TORCH_DTYPES, Tensors
from fedssl.methods import BoundMethod
from fedssl.methods.api import Context, MeanInputs
from fedssl.protocol.runs import RunSpec

PREFIX = "fixed_point."
_TOTALS = f"{PREFIX}totals"
_MATRIX_DIMENSIONS = 2


def bits_of_round(spec: RunSpec, state: Mapping[str, Tensor], *, follows_weights: bool) -> TotalBits | None:
    """Return what all clients know about the total weight of a round, or None if all its words have 64 bits.

    Args:
        state: the coordinator's, before the round.
        follows_weights: whether the round before gave new weights.
    """
    if spec.aggregation.matrix_bits == 64 or not follows_weights or _TOTALS not in state:
        return None
    return TotalBits.after(*state[_TOTALS].tolist())


def narrow_words(bound: BoundMethod, ctx: Context) -> NarrowWords | None:
    """Return which tensors have words of 32 bits in this round: matrices that are trained and averaged."""
    if ctx.total_bits is None:
        return None
    names = {
        each.name
        for each in bound.plan.update
        if each.kind == "weights"
        and len(each.shape) >= _MATRIX_DIMENSIONS
        and TORCH_DTYPES[each.dtype].is_floating_point
    }
    return NarrowWords(frozenset(names), ctx.total_bits)


class Totals:
    """The largest total weight among the means of a round, and its number of clients."""

    def __init__(self, num_clients: int) -> None:
        self._num_clients = self._weight = num_clients

    def add(self, weight: int, fraction_bits: int) -> None:
        """Add the total weight of one mean."""
        if fraction_bits == COUNTED_BITS:
            self._weight = max(self._weight, weight)

    def kept(self, ctx: Context) -> Tensors:
        """Return what the coordinator keeps for the next round; nothing if its spec has no words of 32 bits."""
        if ctx.spec.aggregation.matrix_bits == 64:
            return {}
        return {_TOTALS: torch.tensor([self._weight, self._num_clients])}


class TotalledMeans:
    """`fixed_point_mean` with the round's words. `totals`: of its means so far."""

    def __init__(self, bound: BoundMethod, num_clients: int, ctx: Context) -> None:
        self._narrow = narrow_words(bound, ctx)
        self.totals = Totals(num_clients)

    def __call__(self, inputs: MeanInputs) -> Tensors:
        self.totals.add(int(sum(inputs.weights)), inputs.fraction_bits)
        return inputs.mean(self._narrow)
