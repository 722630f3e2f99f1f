"""Means of updates, one update and one tensor at a time."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

# Elements converted to float64 at a time: few enough for the cache, and enough to hide the cost of the calls.
CHUNK = 1 << 18


class AggregationError(ValueError):
    """These updates cannot be combined."""


def weighted_mean(updates: Iterable[Mapping[str, Tensor]], weights: Sequence[float]) -> dict[str, Tensor]:
    """Return the weighted mean of every tensor over the updates.

        mean = sum_k w_k x_k / sum_k w_k

    The updates are consumed once and in order, one tensor at a time, so memory holds one float64 accumulator and one
    tensor whatever the size of the cohort. The running mean is in float64 and moves towards each update by its share
    of the weight so far, so that equal updates come out unchanged, bit for bit, whatever the weights; it is rounded
    once to the tensor's dtype. The mean of integer tensors is rounded half to even. If one update is not finite, the
    mean is not finite either.

    Args:
        updates: mappings from names to tensors, all with the same names, dtypes and shapes.
        weights: a positive, finite number for each update.

    Returns:
        The mean of each tensor, in name order, with the dtypes and shapes of the updates.

    Raises:
        AggregationError: there are no updates, their names, dtypes or shapes differ, tensors are boolean or complex,
            or the weights do not fit.

    Example:
        >>> import torch
        >>> updates = [{"w": torch.tensor([1.0, 2.0]), "steps": torch.tensor(3)},
        ...            {"w": torch.tensor([5.0, 2.0]), "steps": torch.tensor(4)}]
        >>> weighted_mean(updates, [3, 1])
        {'steps': tensor(3), 'w': tensor([2., 2.])}

    Reference: FedAvg (McMahan et al. 2017), Algorithm 1.
    """
    return streamed_mean(_paired(updates, checked_weights(weights)))


def checked_weights(weights: Sequence[float]) -> list[float]:
    """Return the weights as numbers. Raises AggregationError unless all are positive and their sum is finite."""
    numbers = [float(weight) for weight in weights]
    for index, number in enumerate(numbers):
        if not (number > 0 and math.isfinite(number)):
            raise AggregationError(f"weight {index} must be positive and finite, not {number}")
    if not math.isfinite(sum(numbers)):
        raise AggregationError("the sum of the weights is not finite")
    return numbers


def streamed_mean(
    pairs: Iterable[tuple[Mapping[str, Tensor], float]], factor: Callable[[str, Tensor], float] | None = None
) -> dict[str, Tensor]:
    """Return the mean of `factor(name, x) * x` over (update, weight) pairs; the factor of integer tensors is 1."""
    mean = RunningMean()
    for update, weight in pairs:  # without `enumerate`, which keeps an update until it has the next one
        mean.add(update, weight, factor)
        del update  # before the next one is opened: an update may be as large as memory allows
    return mean.result()


class RunningMean:
    """The mean of the updates that were added so far: what `streamed_mean` computes, one update at a time."""

    def __init__(self) -> None:
        self._means: dict[str, _FloatMean | _IntegerMean] = {}
        self._count = 0

    @torch.no_grad()
    def add(
        self, update: Mapping[str, Tensor], weight: float, factor: Callable[[str, Tensor], float] | None = None
    ) -> None:
        """Move the mean towards an update. After an AggregationError the mean cannot be used any more."""
        where = f"update {self._count}"
        if self._count:
            check_names(self._means.keys(), update.keys(), where)
        self._count += 1
        for name in sorted(update):
            tensor = update[name]
            if name not in self._means:
                self._means[name] = _FloatMean(tensor) if averages_as_float(name, tensor) else _IntegerMean(tensor)
            mean = self._means[name]
            check_like(name, mean.like, tensor, where)
            if isinstance(mean, _FloatMean) and factor is not None:
                mean.add(tensor, weight, factor(name, tensor))
            else:
                mean.add(tensor, weight)
            del tensor

    @torch.no_grad()
    def result(self) -> dict[str, Tensor]:
        """Return the mean of each tensor, rounded once. Further updates can be added afterwards."""
        if not self._count:
            raise AggregationError("there are no updates")
        return {name: mean.result() for name, mean in self._means.items()}


def averages_as_float(name: str, tensor: Tensor) -> bool:
    """Return whether a tensor is averaged as a float; otherwise it is averaged as an integer.

    Raises AggregationError for boolean and complex tensors, which have no mean.
    """
    if tensor.dtype == torch.bool or tensor.is_complex():
        raise AggregationError(f"{name}: there is no mean of {tensor.dtype}")
    return tensor.is_floating_point()


def check_names(expected: Iterable[str], found: Iterable[str], where: str) -> None:
    """Raise AggregationError if names are missing or unexpected."""
    missing, extra = sorted(set(expected) - set(found)), sorted(set(found) - set(expected))
    if missing or extra:
        raise AggregationError(f"{where} has other names: missing {missing}, unexpected {extra}")


def check_like(name: str, like: Tensor, tensor: Tensor, where: str) -> None:
    """Raise AggregationError if a tensor has another dtype or shape."""
    if tensor.dtype != like.dtype or tensor.shape != like.shape:
        expected, found = (f"{t.dtype} {tuple(t.shape)}" for t in (like, tensor))
        raise AggregationError(f"{where} has {name} as {found}, not {expected}")


def chunks(*tensors: Tensor, size: int = CHUNK) -> Iterator[tuple[Tensor, ...]]:
    """Yield the flattened tensors piece by piece."""
    flat = [tensor.reshape(-1) for tensor in tensors]
    return zip(*([each] if each.numel() <= size else torch.split(each, size) for each in flat), strict=True)


def rounded(exact: Tensor, dtype: torch.dtype) -> Tensor:
    """Return float64 values rounded to a dtype in one step.

    A conversion to a dtype with fewer bits than float32 goes through float32 and would round twice. Therefore the
    float32 is rounded to odd, which keeps the information that the second rounding needs.
    """
    if dtype in (torch.float32, torch.float64):
        return exact.to(dtype)
    nearest = exact.float()
    beyond = nearest.double().abs() > exact.abs()
    inexact = nearest.double() != exact
    towards_zero = nearest.view(torch.int32) - beyond.int()
    return (towards_zero | inexact.int()).view(torch.float32).to(dtype)


class _FloatMean:
    """A running weighted mean in float64."""

    def __init__(self, like: Tensor) -> None:
        self.like = torch.empty_like(like, device="meta")
        self._mean = torch.zeros(like.shape, dtype=torch.float64, device=like.device)
        self._weight = 0.0

    def add(self, tensor: Tensor, weight: float, factor: float = 1.0) -> None:
        self._weight += weight
        share = weight / self._weight
        for mean, piece in chunks(self._mean, tensor):
            exact = piece.double()
            mean.lerp_(exact if factor == 1.0 else exact * factor, share)

    def result(self) -> Tensor:
        return rounded(self._mean, self.like.dtype)


class _IntegerMean:
    """A running weighted mean of integers.

    It is kept as float64 offsets from the first integers, so that large equal ones stay exact.
    """

    def __init__(self, first: Tensor) -> None:
        self.like = torch.empty_like(first, device="meta")
        self._first = first.to(torch.int64, copy=True)
        self._offset = torch.zeros(first.shape, dtype=torch.float64, device=first.device)
        self._weight = 0.0

    def add(self, tensor: Tensor, weight: float) -> None:
        self._offset += weight * (tensor.to(torch.int64) - self._first).double()
        self._weight += weight

    def result(self) -> Tensor:
        offset = self._offset / self._weight
        lower = self._first + offset.floor().long()
        even = lower + (lower & 1)
        nearest = self._first + offset.round().long()
        return torch.where(offset - offset.floor() == 0.5, even, nearest).to(self.like.dtype)


def _paired(
    updates: Iterable[Mapping[str, Tensor]], weights: Sequence[float]
) -> Iterator[tuple[Mapping[str, Tensor], float]]:
    count = 0
    for update in updates:
        count += 1
        if count > len(weights):
            raise AggregationError(f"there are more updates than the {len(weights)} weights")
        yield update, weights[count - 1]
        del update
    if 0 < count < len(weights):
        raise AggregationError(f"there are {count} updates for {len(weights)} weights")
