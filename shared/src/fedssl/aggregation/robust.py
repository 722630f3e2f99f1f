"""Combinations that a minority of arbitrary updates cannot move arbitrarily far.

All of them read every update in full, tensor by tensor, and the updates more than once: give a sequence whose tensors
are loaded on access, and memory holds one tensor of each update, or one update, at a time. Distances are Euclidean,
over all floating-point tensors together, summed in float64. A number that is not finite has no place in an order, so
updates that hold one are refused.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from fedssl.aggregation.mean import (
    CHUNK,
    AggregationError,
    averages_as_float,
    check_like,
    check_names,
    checked_weights,
    chunks,
    rounded,
    streamed_mean,
)


def coordinate_median(updates: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Return the median of each coordinate over the updates, all with equal weight.

    With an even number of updates it is the mean of the two middle values, in float64 and rounded once; that of
    integers is rounded half to even. It stays between values of honest updates while less than half are dishonest.

    Args:
        updates: K mappings from names to tensors, all with the same names, dtypes and shapes.

    Returns:
        The median of each tensor, in name order, with the dtypes and shapes of the updates.

    Raises:
        AggregationError: there are no updates, their names, dtypes or shapes differ, or one is not finite.

    Example:
        >>> import torch
        >>> coordinate_median([{"w": torch.tensor([1.0, 9.0])}, {"w": torch.tensor([2.0, 0.0])},
        ...                    {"w": torch.tensor([1e9, 1.0])}])
        {'w': tensor([2., 1.])}

    Reference: Yin et al. 2018, Byzantine-Robust Distributed Learning, Definition 1.
    """
    size = _checked_count(updates)
    return _middle_mean(updates, (size - 1) // 2)


def trimmed_mean(updates: Sequence[Mapping[str, Tensor]], num_trimmed: int) -> dict[str, Tensor]:
    """Return the mean of each coordinate without its `num_trimmed` lowest and highest values, all with equal weight.

    The mean is taken in float64 and rounded once; that of integers is rounded half to even. With `num_trimmed` 0 it is
    the plain mean, up to rounding in float64. It is bounded while at most `num_trimmed` updates are dishonest.

    Args:
        updates: K mappings from names to tensors, all with the same names, dtypes and shapes.
        num_trimmed: how many values are removed at each end, less than K / 2.

    Returns:
        The mean of each tensor, in name order, with the dtypes and shapes of the updates.

    Raises:
        AggregationError: nothing would be left, or as for :func:`coordinate_median`.

    Example:
        >>> import torch
        >>> trimmed_mean([{"w": torch.tensor([value])} for value in (1.0, 2.0, 4.0, -1e9)], 1)
        {'w': tensor([1.5000])}

    Reference: Yin et al. 2018, Byzantine-Robust Distributed Learning, Definition 2, with beta = num_trimmed / K.
    """
    size = _checked_count(updates)
    if not num_trimmed >= 0 or 2 * num_trimmed >= size:
        raise AggregationError(
            f"{num_trimmed} values cannot be removed at both ends of {size}: at least one must be left"
        )
    return _middle_mean(updates, num_trimmed)


def multi_krum(updates: Sequence[Mapping[str, Tensor]], num_byzantine: int, num_selected: int) -> dict[str, Tensor]:
    """Return the mean of the `num_selected` updates that lie closest to their neighbours.

        score_k = sum of the K - f - 2 smallest |x_k - x_j|^2 over j != k        f = num_byzantine

    The updates with the lowest scores are chosen, the earlier one if two are equal, and count equally. With
    `num_selected` 1 this is Krum. The paper's guarantee needs 2 f + 2 < K; the score itself needs f + 2 < K.

    Args:
        updates: K mappings from names to tensors, all with the same names, dtypes and shapes.
        num_byzantine: f, how many updates may be dishonest.
        num_selected: how many updates are averaged, 1..K.

    Returns:
        The mean of each tensor, in name order, with the dtypes and shapes of the updates.

    Raises:
        AggregationError: there are too few updates for these numbers, or as for :func:`coordinate_median`.

    Example:
        >>> import torch
        >>> multi_krum([{"w": torch.tensor([value])} for value in (1.0, 2.0, 2.5, 1e9)], 1, 2)
        {'w': tensor([2.2500])}

    Reference: Blanchard et al. 2017, Machine Learning with Adversaries, Section 4 (Krum) and 5 (Multi-Krum).
    """
    size = _checked_count(updates)
    if num_byzantine < 0 or size - num_byzantine - 2 < 1:
        raise AggregationError(
            f"Krum with {num_byzantine} dishonest updates needs at least {num_byzantine + 3} updates, not {size}"
        )
    if not 1 <= num_selected <= size:
        raise AggregationError(f"Krum cannot select {num_selected} of {size} updates")
    with torch.no_grad():
        nearest = _squared_distances(updates).sort(dim=1).values[:, 1 : size - num_byzantine - 1]  # 0 is itself
    order = torch.argsort(nearest.sum(dim=1), stable=True)
    return streamed_mean((updates[number], 1.0) for number in sorted(order[:num_selected].tolist()))


def geometric_median(
    updates: Sequence[Mapping[str, Tensor]], weights: Sequence[float], num_iterations: int, smoothing: float
) -> dict[str, Tensor]:
    """Return the point with the smallest weighted sum of distances to the updates, by Weiszfeld's iteration.

        v <- sum_k b_k x_k / sum_k b_k,   b_k = w_k / max(smoothing, |v - x_k|)       from the weighted mean

    Integer tensors are averaged with the last b. The point is bounded while dishonest updates have less than half of
    the weight: each step brings it nearer by about the ratio of honest to dishonest weight, so an update that lies D
    times farther out than the others needs log D / log ratio steps. The iteration ends early when it stands still.

    Args:
        updates: K mappings from names to tensors, all with the same names, dtypes and shapes.
        weights: w, a positive, finite number for each update.
        num_iterations: the largest number of steps; 0 returns the weighted mean.
        smoothing: the distance below which updates count as equally near, positive.

    Returns:
        The point, in name order, with the dtypes and shapes of the updates.

    Raises:
        AggregationError: the weights, `num_iterations` or `smoothing` do not fit, or as for :func:`coordinate_median`.

    Example:
        >>> import torch
        >>> updates = [{"w": torch.tensor([value, 0.0])} for value in (0.0, 1.0, 100.0)]
        >>> geometric_median(updates, [1, 1, 1], num_iterations=100, smoothing=1e-6)
        {'w': tensor([1., 0.])}

    Reference: RFA (Pillutla et al. 2022), Algorithm 2.
    """
    numbers = checked_weights(weights)
    if len(numbers) != _checked_count(updates):
        raise AggregationError(f"there are {len(updates)} updates for {len(numbers)} weights")
    if num_iterations < 0 or not (smoothing > 0 and math.isfinite(smoothing)):
        raise AggregationError("num_iterations must not be negative, and smoothing must be positive and finite")
    shares = numbers
    for _ in range(num_iterations):
        center = streamed_mean((_Exact(update), share) for update, share in zip(updates, shares, strict=True))
        with torch.no_grad():
            distances = [_distance(center, update) for update in updates]
        before = shares
        shares = [weight / max(smoothing, distance) for weight, distance in zip(numbers, distances, strict=True)]
        if _are_proportional(before, shares):
            break
    return streamed_mean(zip(updates, shares, strict=True))


class _Exact(Mapping[str, Tensor]):
    """An update's floating-point tensors in float64, converted when they are read."""

    def __init__(self, update: Mapping[str, Tensor]) -> None:
        self._update = update
        self._names = _float_names(update)

    def __getitem__(self, name: str) -> Tensor:
        return self._update[name].double()

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def _checked_count(updates: Sequence[Mapping[str, Tensor]]) -> int:
    """Return K. Raises AggregationError unless the updates are alike and finite."""
    if not updates:
        raise AggregationError("there are no updates")
    like = {name: tensor.to("meta") for name, tensor in sorted(updates[0].items())}
    for number, update in enumerate(updates):
        where = f"update {number}"
        check_names(like, update, where)
        for name in like:
            tensor = update[name]
            check_like(name, like[name], tensor, where)
            if averages_as_float(name, tensor) and not bool(tensor.isfinite().all()):
                raise AggregationError(f"{where} has numbers in {name} that are not finite")
    return len(updates)


def _float_names(update: Mapping[str, Tensor]) -> list[str]:
    return [name for name in sorted(update) if averages_as_float(name, update[name])]


def _middle_mean(updates: Sequence[Mapping[str, Tensor]], num_trimmed: int) -> dict[str, Tensor]:
    """Return the mean of each coordinate's values without the `num_trimmed` lowest and highest."""
    stop = len(updates) - num_trimmed
    found = {}
    with torch.no_grad():
        for name in sorted(updates[0]):
            tensors = [update[name] for update in updates]
            mean = _mean_of_floats if averages_as_float(name, tensors[0]) else _mean_of_integers
            found[name] = _by_pieces(tensors, slice(num_trimmed, stop), mean)
    return found


def _by_pieces(tensors: Sequence[Tensor], kept: slice, mean: Callable[[Tensor], Tensor]) -> Tensor:
    """Return the mean of the kept ones of the sorted values (K, n) of each piece, in the shape of the tensors."""
    pieces = chunks(*tensors, size=max(1, CHUNK // len(tensors)))
    parts = [mean(torch.stack(piece).sort(dim=0).values[kept]) for piece in pieces]
    return torch.cat(parts).reshape(tensors[0].shape)


def _mean_of_floats(kept: Tensor) -> Tensor:
    """Return the means (n,) of sorted values (k, n). As offsets from the lowest, equal ones come out unchanged."""
    lowest = kept[0].double()
    return rounded(lowest + (kept.double() - lowest).mean(dim=0), kept.dtype)


def _mean_of_integers(kept: Tensor) -> Tensor:
    exact = kept.to(torch.int64)
    lowest = exact[0]
    return (lowest + _half_to_even(lowest, (exact - lowest).double().mean(dim=0))).to(kept.dtype)


def _half_to_even(base: Tensor, offset: Tensor) -> Tensor:
    """Return the integers nearest to `offset`; of two equally near ones that with which base + offset is even."""
    floor = offset.floor()
    lower = floor.long()
    return torch.where(offset - floor == 0.5, lower + ((base + lower) & 1), offset.round().long())


def _squared_distances(updates: Sequence[Mapping[str, Tensor]]) -> Tensor:
    """Return |x_i - x_j|^2 (K, K), float64."""
    size = len(updates)
    total = torch.zeros(size, size, dtype=torch.float64)
    for name in _float_names(updates[0]):
        for piece in chunks(*(update[name] for update in updates), size=max(1, CHUNK // size)):
            exact_KP = torch.stack(piece).double()
            for number in range(size - 1):
                squared = (exact_KP[number + 1 :] - exact_KP[number]).square().sum(dim=1).cpu()
                total[number, number + 1 :] += squared
                total[number + 1 :, number] += squared
    return total


def _are_proportional(before: Sequence[float], after: Sequence[float]) -> bool:
    """Return whether two lists of weights describe the same mean, up to rounding."""
    ratio = sum(after) / sum(before)
    return all(math.isclose(ratio * b, a, rel_tol=1e-12) for b, a in zip(before, after, strict=True))


def _distance(center: Mapping[str, Tensor], update: Mapping[str, Tensor]) -> float:
    squared = 0.0
    for name, exact in center.items():
        for piece, own in chunks(exact, update[name]):
            squared += float((own.double() - piece).square().sum())
    return math.sqrt(squared)
