"""L-DAWA: the mean of updates, each tensor scaled by how well its direction agrees with the previous global one."""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping

from torch import Tensor

from fedssl.aggregation.mean import check_like, check_names, chunks, streamed_mean

_VARIANCE = "running_var"
BATCH_NORM_BUFFERS = frozenset({"running_mean", _VARIANCE, "num_batches_tracked"})


def is_batch_norm_buffer(name: str) -> bool:
    """Return whether a tensor's name is that of a BatchNorm statistic.

    Example:
        >>> is_batch_norm_buffer("encoder.bn1.running_mean"), is_batch_norm_buffer("encoder.bn1.weight")
        (True, False)
    """
    return name.rpartition(".")[2] in BATCH_NORM_BUFFERS


def is_variance(name: str) -> bool:
    """Return whether a tensor's name is that of a BatchNorm's variances."""
    return name.rpartition(".")[2] == _VARIANCE


def layerwise_divergence_aware(
    updates: Iterable[Mapping[str, Tensor]],
    previous: Mapping[str, Tensor],
    plain: Callable[[str], bool] = is_batch_norm_buffer,
) -> dict[str, Tensor]:
    """Return the mean of the updates with each tensor scaled by its cosine to the previous global one.

        theta_g^l = 1/K sum_k min(1, cos(theta_k^l, theta_prev^l)) theta_k^l

    Every client has the same weight and the factors are not renormalised, so disagreement shrinks a tensor. If either
    tensor has norm zero, there is no angle and the update's tensor is not scaled; nor are integer tensors (which stay
    integral) and single numbers. The updates are consumed once and in order, one tensor at a time, as in
    `weighted_mean`.

    Args:
        updates: mappings from names to tensors.
        previous: the global tensors that were broadcast, by the same names, with the same dtypes and shapes.
        plain: returns whether a tensor is averaged without scaling, by its name. By default these are the BatchNorm
            statistics, which are not directions; `lambda name: False` scales them too, as the authors' code does.

    Returns:
        The combined tensors, in name order, with the dtypes and shapes of the updates.

    Raises:
        AggregationError: there are no updates, or their names, dtypes or shapes differ.

    Example:
        >>> import torch
        >>> updates = [{"w": torch.tensor([2.0, 0.0])}, {"w": torch.tensor([0.0, 2.0])}]
        >>> layerwise_divergence_aware(updates, {"w": torch.tensor([1.0, 0.0])})  # cosines 1 and 0
        {'w': tensor([1., 0.])}

    Reference: L-DAWA (Rehman et al. 2023). Deviation from the authors' code: BatchNorm statistics are not scaled.
    """
    return streamed_mean(_uniform(updates, previous), capped_cosines(previous, plain))


def capped_cosines(
    previous: Mapping[str, Tensor], plain: Callable[[str], bool] = is_batch_norm_buffer
) -> Callable[[str, Tensor], float]:
    """Return L-DAWA's factor of a client's tensor, min(1, cos(x, previous)), as a function of its name and the tensor.

    The factor is 1 for single numbers, and for tensors whose names are `plain`. It depends on one client only.

    Example:
        >>> import torch
        >>> factor = capped_cosines({"w": torch.tensor([1.0, 0.0])})
        >>> factor("w", torch.tensor([3.0, 4.0]))
        0.6

    Reference: L-DAWA (Rehman et al. 2023).
    """

    def factor(name: str, tensor: Tensor) -> float:
        scaled = tensor.ndim > 0 and not plain(name)
        return _capped_cosine(tensor, previous[name]) if scaled else 1.0

    return factor


def _uniform(
    updates: Iterable[Mapping[str, Tensor]], previous: Mapping[str, Tensor]
) -> Iterator[tuple[Mapping[str, Tensor], float]]:
    numbers = itertools.count()
    for update in updates:  # without `enumerate`, which keeps an update until it has the next one
        number = next(numbers)
        check_names(previous.keys(), update.keys(), f"update {number}")
        if number == 0:
            for name in sorted(previous):
                check_like(name, previous[name], update[name], "update 0")
        yield update, 1.0
        del update


def _capped_cosine(a: Tensor, b: Tensor) -> float:
    """Return min(1, cos(a, b)), or 1 if either has length zero; exactly 1 if a and b are equal."""
    dot = length_a = length_b = 0.0
    for piece_a, piece_b in chunks(a, b):
        exact_a, exact_b = piece_a.double(), piece_b.double()
        dot += float(exact_a @ exact_b)
        length_a += float(exact_a @ exact_a)
        length_b += float(exact_b @ exact_b)
    lengths = math.sqrt(length_a * length_b)
    return min(1.0, dot / lengths) if lengths > 0 else 1.0
