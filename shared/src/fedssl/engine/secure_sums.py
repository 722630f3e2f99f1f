"""The words that a client adds up in a secure round, and the result that the coordinator finds from their sum.

The coordinator's half of a method computes means with `Context.fixed_mean`, and uses the updates for nothing else if
its spec may ask for secure aggregation. So the same code runs at both ends. At a client it has one update, and
`fixed_mean` records its words. At the coordinator it has the names and shapes of the updates, and `fixed_mean` reads
the mean from the sum of all clients' words. The words of its training's numbers come first (`summed_metrics.py`).
"""

import dataclasses
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from fedssl.aggregation import AggregationError, OutOfRange
from fedssl.aggregation.fixed_point import COUNTED_BITS, FixedPointSum, NarrowWords, TotalBits, whole_weights
from fedssl.artifacts.header import num_bytes
from fedssl.artifacts.tensors import TORCH_DTYPES, Tensors, in_name_order
from fedssl.engine.aggregation import ServerResult, ValueOutOfRange, published, split_state
from fedssl.engine.encoder_average import next_average
from fedssl.engine.narrow_words import Totals, narrow_words
from fedssl.engine.norm_bounding import NO_NORMS, screened
from fedssl.engine.summed_metrics import NUM_WORDS, metric_words, summed_metrics
from fedssl.errors import MethodError
from fedssl.methods import BoundMethod, Method
from fedssl.methods.api import Context, MeanInputs, ServerState, Update
from fedssl.protocol.plan import TensorSpec
from fedssl.protocol.secure_work import vector_tensors
from fedssl.protocol.work import WorkItem


class UnusableUpdate(MethodError):
    """A client's update is not finite, lies beyond every possible training, or does not fit into words of 64 bits: it
    stays with the client."""


class NoSecureSum(MethodError):
    """A secure round ends without a sum: the weights and the clients' states stay as they were. `rejected`: clients
    that kept their updates, because these could not be used."""

    def __init__(self, message: str, rejected: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.rejected = rejected


def client_words(method: Method, broadcast: Tensors, update: Update, num_clients: int, ctx: Context) -> Tensor:
    """Return the words of one client, int64 (N,): those of its metrics, and for each mean its weight and its tensors.

    An update beyond a norm of the spec's `robustness` is clipped first. `num_clients`: of the round's cohort.

    Raises UnusableUpdate, and ValueOutOfRange if a value does not fit in a round that has words of 32 bits.
    """
    bound = method.bind(ctx.spec)
    kept, norms = screened(
        [update], broadcast, bound.plan, ctx, lambda each: bound.server.refusal(broadcast, each, ctx)
    )
    if not kept:
        raise UnusableUpdate(f"the update of {update.client_id} cannot be used: {norms.rejected[update.client_id]}")
    words = _Recorded(num_clients, narrow_words(bound, ctx))
    try:
        bound.server.aggregate_sums(in_name_order(broadcast), kept, dataclasses.replace(ctx, fixed_mean=words))
    except OutOfRange as error:
        if ctx.total_bits is None:
            raise UnusableUpdate(f"the update of {update.client_id} cannot be used: {error}") from error
        raise ValueOutOfRange(f"out of range: {error}", NO_NORMS) from error
    except AggregationError as error:
        raise MethodError(f"the update of {update.client_id} cannot be added up: {error}") from error
    is_clipped = bool(norms.clipped)
    numbers = metric_words(update.num_examples, update.metrics, num_clients, ctx, is_clipped=is_clipped)
    return torch.cat([numbers, *words.parts])


def context_of(item: WorkItem) -> Context:
    """Return the context in which the words of a client's update are computed, here and at the coordinator."""
    bits = None if item.total_bits is None else TotalBits(*item.total_bits)
    return Context(spec=item.spec, round_number=item.round_number, client_id=item.client_id, total_bits=bits)


def num_client_words(method: Method, ctx: Context) -> int:
    """Return N, the number of words that `client_words` returns for each client. No tensor is computed."""
    bound = method.bind(ctx.spec)
    counted = _Counted(narrow_words(bound, ctx))
    bound.server.aggregate_sums(_shapes(bound.plan.received), _any_updates(bound, 1), _with(ctx, counted))
    return NUM_WORDS + counted.total


def tensors_sent(method: Method, ctx: Context) -> tuple[TensorSpec, ...]:
    """Return the tensors in the file of each client's masked vector, with what leaves next to it."""
    return vector_tensors(num_client_words(method, ctx), ctx.spec.sent_apart(method.bind(ctx.spec).plan))


def num_vector_bytes(method: Method, ctx: Context) -> int:
    """Return the size of each client's masked vector, and of what leaves next to it: 8 bytes per word, and one word
    that counts clients."""
    return sum(num_bytes(each.dtype, each.shape) for each in tensors_sent(method, ctx))


def run_secure_aggregation(
    method: Method,
    state: Mapping[str, Tensor],
    words: Tensor,
    num_clients: int,
    ctx: Context,
    *,
    apart: Mapping[str, Tensors] | None = None,
) -> ServerResult:
    """Return the next state from the sum of the clients' words: the bits of `run_aggregation` with their updates.

    Args:
        method: whose config may ask for secure aggregation.
        state: the coordinator's, before the round.
        words: int64 (N,), the sum of what `client_words` returned for each client.
        num_clients: how many clients are in the sum.
        ctx: of the coordinator in this round; its `restarting` names only clients in the sum.
        apart: the tensors of `RunSpec.sent_apart` of each client in the sum, by name; not needed if the spec has none.

    Raises NoSecureSum if the words are not such a sum, the weights are more than `robustness.max_examples` allows all
    clients together, or `apart` or the result is not finite: some client sent invalid words. Raises ValueOutOfRange
    if the total weight is beyond the scales of words of 32 bits.
    """
    numbers, words = words[:NUM_WORDS], words[NUM_WORDS:]
    bound = method.bind(ctx.spec)
    summed = _Summed(words, num_clients, narrow_words(bound, ctx), ctx.spec.robustness.max_examples)
    known, kept = split_state(in_name_order(state))
    try:
        found, metrics = bound.server.aggregate_sums(known, _any_updates(bound, num_clients), _with(ctx, summed))
    except OutOfRange as error:
        raise ValueOutOfRange(f"out of range: {error}", NO_NORMS) from error
    except AggregationError as error:
        raise NoSecureSum(f"the sum cannot be used: {error}") from error
    if summed.rest.numel():
        raise MethodError(f"the sum has {summed.rest.numel()} words more than the method's means")
    updates = _apart_updates(apart or {})
    try:
        found, metrics = bound.server.finish(found, metrics, known, updates, ctx)
        found = bound.server.restarted(found) if ctx.restarting else found
        metrics = {**metrics, **summed_metrics(numbers, num_clients)}
        kept = next_average(bound, found, kept, ctx) | summed.totals.kept(ctx)
        return published(bound, found, kept, metrics, ctx)
    except MethodError as error:
        raise NoSecureSum(f"the sum cannot be used: {error}") from error


class _Recorded:
    """Records the words of one update, and returns the update itself as its mean."""

    def __init__(self, num_clients: int, narrow: NarrowWords | None) -> None:
        self._num_clients, self._narrow = num_clients, narrow
        self.parts: list[Tensor] = []

    def __call__(self, inputs: MeanInputs) -> Tensors:
        total = _empty_sum(inputs, self._num_clients, self._narrow)
        for update, weight in zip(inputs.updates, whole_weights(inputs.weights), strict=True):
            total.add(update, weight, inputs.factor)
        self.parts.append(total.vector())
        return total.mean()


class _Counted:
    """Counts the words of an update from the shapes of its tensors."""

    def __init__(self, narrow: NarrowWords | None) -> None:
        self._narrow = narrow
        self.total = 0

    def __call__(self, inputs: MeanInputs) -> Tensors:
        (update,) = inputs.updates
        self.total += _empty_sum(inputs, 1, self._narrow).num_words(update)
        return {name: update[name] for name in sorted(update)}


class _Summed:
    """Reads each mean from the sum of all words. `rest`: what no mean was read from yet. `totals`: of all means.

    `max_examples`: the largest weight of one client, or None.
    """

    def __init__(self, words: Tensor, num_clients: int, narrow: NarrowWords | None, max_examples: int | None) -> None:
        self.rest, self._num_clients, self._narrow = words, num_clients, narrow
        self._most = None if max_examples is None else max_examples * num_clients
        self.totals = Totals(num_clients)

    def __call__(self, inputs: MeanInputs) -> Tensors:
        total = _empty_sum(inputs, self._num_clients, self._narrow)
        self.rest = total.take(self.rest, next(iter(inputs.updates)), self._num_clients)
        if self._most is not None and inputs.fraction_bits == COUNTED_BITS and total.weight > self._most:
            raise AggregationError(
                f"the weights of {self._num_clients} clients add up to {total.weight}, and robustness.max_examples "
                f"allows {self._most}: some client sent a larger weight than it may have"
            )
        self.totals.add(total.weight, inputs.fraction_bits)
        return total.mean()


def _empty_sum(inputs: MeanInputs, num_clients: int, narrow: NarrowWords | None) -> FixedPointSum:
    return FixedPointSum(inputs.base, fraction_bits=inputs.fraction_bits, num_clients=num_clients, narrow=narrow)


def _apart_updates(apart: Mapping[str, Tensors]) -> list[Update]:
    """Return the updates of the clients in name order, with what left next to the sum. Raises NoSecureSum."""
    for name, tensors in sorted(apart.items()):
        if wrong := sorted(each for each, tensor in tensors.items() if not bool(tensor.isfinite().all())):
            raise NoSecureSum(f"{wrong[0]} of {name}, which leaves next to the sum, is not finite")
    return [Update(name, 1, lambda sent=tensors: sent) for name, tensors in sorted(apart.items())]  # type: ignore[misc]


def _with(ctx: Context, means: "_Counted | _Summed") -> Context:
    return dataclasses.replace(ctx, fixed_mean=means)


def _any_updates(bound: BoundMethod, num_clients: int) -> list[Update]:
    """Return as many updates as are in the sum. They have names and shapes, but no values and no client."""
    shapes = _shapes(bound.plan.update)
    return [Update("", 1, lambda: shapes)] * num_clients


def _shapes(tensors: Sequence[TensorSpec]) -> ServerState:
    return {
        each.name: torch.empty(each.shape, dtype=TORCH_DTYPES[each.dtype], device="meta")
        for each in sorted(tensors, key=lambda each: each.name)
    }
