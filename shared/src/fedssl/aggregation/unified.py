"""FedU2's efficient unified aggregation: a step along the direction on which the clients agree most."""

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from fedssl.aggregation.layerwise import is_batch_norm_buffer
from fedssl.aggregation.mean import (
    AggregationError,
    averages_as_float,
    check_like,
    check_names,
    checked_weights,
    chunks,
    rounded,
    weighted_mean,
)
from fedssl.aggregation.min_norm import min_norm_weights_from_gram

# The number of float64 elements, over all clients, that are in memory at a time.
BUDGET = 1 << 22


def efficient_unified_aggregation(
    updates: Sequence[Mapping[str, Tensor]],
    previous: Mapping[str, Tensor],
    weights: Sequence[float],
    server_learning_rate: float = 8.0,
    plain: Callable[[str], bool] = is_batch_norm_buffer,
) -> dict[str, Tensor]:
    """Move the global parameters along the shortest convex combination of the clients' normalised drifts.

        G_k = theta_g - theta_k,   Ghat_k = 2 G_k / ||G_k||   (all parameters as one vector)
        w = argmin_{w >= 0, sum w = 1} || sum_k w_k Ghat_k ||,   theta_g <- theta_g - eta sum_k w_k Ghat_k

    Each tensor is read twice from every update, K tensors of one name at a time: once for the scalar products, once for
    the step. Clients that did not move have no direction and no weight; if no client moved, the parameters stay.

    Args:
        updates: mappings from names to tensors, which are read more than once.
        previous: the global tensors theta_g that were broadcast.
        weights: a positive number for each update (FedU2: its batches), for the tensors that are averaged.
        server_learning_rate: eta.
        plain: returns whether a tensor is averaged with `weights` instead, by its name; by default these are the
            BatchNorm statistics. Integer tensors are always averaged.

    Returns:
        The new global tensors, in name order, with the dtypes and shapes of the previous ones.

    Raises:
        AggregationError: there are no updates, or their names, dtypes, shapes or weights do not fit.

    Example:
        >>> import torch
        >>> previous = {"w": torch.zeros(2)}
        >>> updates = [{"w": torch.tensor([3.0, 0.0])}, {"w": torch.tensor([0.0, 1.0])}]
        >>> efficient_unified_aggregation(updates, previous, [1, 1], server_learning_rate=0.5)
        {'w': tensor([0.5000, 0.5000])}

    Reference: FedU2 (Liao et al. 2024), the aggregator as in its authors' code. Deviation: the min-norm point is exact.
    """
    numbers = checked_weights(weights)
    if len(updates) != len(numbers) or not updates:
        raise AggregationError(f"there are {len(updates)} updates for {len(numbers)} weights")
    if not (server_learning_rate > 0 and math.isfinite(server_learning_rate)):
        raise AggregationError(f"server_learning_rate must be positive and finite, not {server_learning_rate}")
    for index, update in enumerate(updates):
        check_names(previous.keys(), update.keys(), f"update {index}")
    stepped = [name for name in sorted(previous) if averages_as_float(name, previous[name]) and not plain(name)]
    averaged = sorted(previous.keys() - set(stepped))
    with torch.no_grad():
        steps = server_learning_rate * _step_sizes(updates, previous, stepped)
        result = {name: _stepped(name, updates, previous[name], steps) for name in stepped}
    result |= weighted_mean(({name: update[name] for name in averaged} for update in updates), numbers)
    return {name: result[name] for name in sorted(result)}


def _step_sizes(updates: Sequence[Mapping[str, Tensor]], previous: Mapping[str, Tensor], names: list[str]) -> Tensor:
    """Return the factor of each client's unnormalised drift: 2 w_k / ||G_k||, or 0 if the client did not move."""
    gram = torch.zeros(len(updates), len(updates), dtype=torch.float64)
    for name in names:
        tensors = [update[name] for update in updates]
        for index, tensor in enumerate(tensors):
            check_like(name, previous[name], tensor, f"update {index}")
        for origin, *pieces in chunks(previous[name], *tensors, size=max(1, BUDGET // len(updates))):
            drift_KC = origin.double() - torch.stack(pieces).double()
            gram += (drift_KC @ drift_KC.T).cpu()
    if not gram.isfinite().all():
        raise AggregationError("the updates hold numbers that are not finite")
    length_K = gram.diagonal().sqrt()
    moved = length_K.nonzero()[:, 0]
    steps_K = torch.zeros_like(length_K)
    if len(moved) > 0:
        length = length_K[moved]
        weights = min_norm_weights_from_gram(gram[moved][:, moved] / (length[:, None] * length))
        steps_K[moved] = 2 * weights / length
    return steps_K


def _stepped(name: str, updates: Sequence[Mapping[str, Tensor]], previous: Tensor, steps_K: Tensor) -> Tensor:
    exact = previous.to(torch.float64, copy=True)
    for update, step in zip(updates, steps_K.tolist(), strict=True):
        if step > 0:
            for new, origin, piece in chunks(exact, previous, update[name]):
                new -= step * (origin.double() - piece.double())
    return rounded(exact, previous.dtype)
