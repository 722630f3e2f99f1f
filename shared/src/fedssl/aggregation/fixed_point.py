"""Weighted means as sums of integers on a public scale: the order of the updates changes no bit."""

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from fedssl.aggregation.mean import (
    AggregationError,
    averages_as_float,
    check_like,
    check_names,
    checked_weights,
    chunks,
    rounded,
)

COUNTED_BITS = 24
"""Fractional bits of a difference that is multiplied by a number of images or batches."""

EQUAL_BITS = 40
"""Fractional bits if every weight is 1, which leaves 16 more bits for the fraction."""

LARGEST_EXACT = 1 << 53
"""Every integer up to this size is exact in float64. 1,023 of them fit into the sum of 64 bits."""

_WORD_LIMIT = (1 << 63) - 1

_NARROW_BITS = 30
"""Bits of the absolute value of a sum of 32-bit words: one less than fit, so that sums of halves stay apart."""

_HEADROOM_BITS = 2
"""A matrix may move by 2^2 times the power of two above its largest value. Training moves it by a fraction of that."""

_SMALLEST_EXPONENT = -16
"""Stands for the largest value of a matrix of zeros."""

MOST_TOTAL_BITS = 26
"""Larger total weights have words of 64 bits: too few of 30 bits would be left for a client with one image."""

Factor = Callable[[str, Tensor], float]
"""Returns the number by which a client's own floating-point tensor is multiplied, from its name and the tensor."""


class OutOfRange(AggregationError):
    """A value of an update does not fit into its word on the public scale. `tensor` names where it is."""

    def __init__(self, tensor: str, why: str) -> None:
        super().__init__(f"{tensor}: {why}")
        self.tensor = tensor


@dataclass(frozen=True, slots=True)
class TotalBits:
    """The bits of a round's total weight, which all clients know: at most 2^weights, or 2^clients if each weight is 1.

    If the weight is more, a mean of words of 32 bits raises OutOfRange.
    """

    weights: int
    clients: int

    @classmethod
    def after(cls, weight: int, num_clients: int) -> Self | None:
        """Return bits for twice the total weight and the number of clients of the round before.

        None if there is none before, or if the weight leaves too few bits for a client with one image.

        Example:
            >>> TotalBits.after(1000, 10)
            TotalBits(weights=11, clients=5)
        """
        found = cls((2 * weight - 1).bit_length(), (2 * num_clients - 1).bit_length())
        return found if weight > 0 and max(found.weights, found.clients) <= MOST_TOTAL_BITS else None


@dataclass(frozen=True, slots=True)
class NarrowWords:
    """Which tensors have words of 32 bits, on scales that follow from the broadcast and the bits of the total weight.

    A client's difference d from the broadcast of such a tensor, whose largest absolute value is below 2^e, has the word
    rint(d w 2^f) with f = 30 - total_bits - (e + 2). It is refused unless |d| <= 2^(e + 2). Together with the bound on
    the total weight, no sum exceeds 2^30, and two of them share a word of 64 bits.
    """

    names: Collection[str]
    total_bits: TotalBits


def largest_word(num_clients: int) -> int:
    """Return the largest absolute value of one client's words: the sum of all clients' fits into 64 bits.

    Example:
        >>> largest_word(1000) == 2**53, largest_word(2000) < 2**53
        (True, True)
    """
    return min(LARGEST_EXACT, _WORD_LIMIT // max(1, num_clients))


def fixed_point_words(
    name: str,
    tensor: Tensor,
    base: Tensor | None,
    weight: int,
    *,
    fraction_bits: int,
    num_clients: int,
    factor: float = 1.0,
    largest: int | None = None,
) -> Tensor:
    """Return one client's words of one tensor: its weighted difference from the broadcast, rounded once.

        q = rint((a x - base) w 2^f)    of floating-point tensors, in float64;    q = (x - base) w    of integer tensors

    Args:
        name: the tensor's name, for the error.
        tensor: x, the client's tensor after training.
        base: the broadcast's tensor of this name, or None if the client sends a difference already.
        weight: w, the client's number of images or batches, or 1.
        fraction_bits: f. The scale 2^-f is public, so that all clients use the same one.
        num_clients: the largest number of clients whose words are added.
        factor: a, by which the update's own floating-point tensor is scaled (L-DAWA).
        largest: the largest absolute value of a word, by default `largest_word(num_clients)`.

    Returns:
        int64, of the tensor's shape.

    Raises:
        OutOfRange: a word would be larger than `largest`, or the value is not finite. Nothing is clipped.

    Example:
        >>> import torch
        >>> fixed_point_words("w", torch.tensor([1.5]), torch.tensor([1.0]), 3, fraction_bits=2, num_clients=2)
        tensor([6])

    Reference: fedssl's own arithmetic, described in docs/methods.md.
    """
    is_float = averages_as_float(name, tensor)
    words = torch.empty(tensor.shape, dtype=torch.int64, device=tensor.device)
    pieces = (words, tensor) if base is None else (words, tensor, base)
    scale = math.ldexp(float(weight), fraction_bits if is_float else 0)
    largest = largest_word(num_clients) if largest is None else largest
    for word, piece, *origin in chunks(*pieces):
        exact = piece.double() if factor == 1.0 or not is_float else piece.double() * factor
        moved = exact - origin[0].double() if origin else exact
        scaled = (moved * scale).round_()
        if not bool((scaled.abs() <= largest).all()):  # a NaN is not within either
            raise OutOfRange(name, _why(scaled, scale, largest))
        if is_float:
            word.copy_(scaled)
        else:
            whole = piece.to(torch.int64)
            word.copy_((whole - origin[0].to(torch.int64) if origin else whole) * weight)
    return words


def _why(scaled: Tensor, scale: float, largest: int) -> str:
    if not bool(scaled.isfinite().all()):
        return "a value is not finite"
    return (
        f"a value is {float(scaled.abs().max()) / scale:.6g} from the broadcast, and with its weight at most "
        f"{largest / scale:.6g} can be summed: lower training.optimizer.learning_rate, or set "
        'aggregation.arithmetic = "float"'
    )


def whole_weights(weights: Sequence[float]) -> list[int]:
    """Return the weights as integers. Raises AggregationError unless each is a positive whole number."""
    numbers = checked_weights(weights)
    if fractions := [number for number in numbers if not number.is_integer()]:
        raise AggregationError(f"a weight in fixed point must be a whole number, not {fractions[0]}")
    return [int(number) for number in numbers]


def _paired(words: Tensor) -> Tensor:
    """Return int64 (ceil(N / 2),): the first half of N words, each below 2^31 in absolute value, plus 2^32 times the
    second half."""
    half = (words.numel() + 1) // 2
    paired = words[:half].clone()
    paired[: words.numel() - half] += words[half:] << 32
    return paired


def _unpaired(sums: Tensor, num_words: int) -> Tensor:
    """Return int64 (N,): the sums of the words that were paired, from the sum of what `_paired` returned."""
    first = ((sums & 0xFFFFFFFF) ^ (1 << 31)) - (1 << 31)
    second = (sums - first) >> 32
    return torch.cat([first, second[: num_words - first.numel()]])


class FixedPointSum:
    """The sum of clients' words and weights. Adding is exact, so any order and any tree of partial sums is equal.

    `base`: the tensors that were broadcast, or None if the clients send differences. `num_clients`: the largest number
    of clients that are added. `narrow`: the tensors with words of 32 bits, if the base has them.
    """

    def __init__(
        self,
        base: Mapping[str, Tensor] | None,
        *,
        fraction_bits: int,
        num_clients: int,
        narrow: NarrowWords | None = None,
    ) -> None:
        self._base, self._fraction_bits, self._num_clients = base, fraction_bits, num_clients
        self._narrow = frozenset() if narrow is None or base is None else frozenset(narrow.names)
        self._total_bits = 0
        if narrow is not None:
            is_equal = fraction_bits == EQUAL_BITS
            self._total_bits = narrow.total_bits.clients if is_equal else narrow.total_bits.weights
        self._exponents: dict[str, int] = {}
        self._words: dict[str, Tensor] = {}
        self._like: dict[str, Tensor] = {}
        self._count = self._weight = 0

    def add(self, update: Mapping[str, Tensor], weight: int, factor: Factor | None = None) -> None:
        """Add one client's update with its weight, a positive integer. `factor` is as in `fixed_point_mean`."""
        names, where = sorted(update), f"update {self._count}"
        check_names(self._words.keys() if self._count else names, names, where)
        if self._base is not None and (unknown := sorted(set(names) - self._base.keys())):
            raise AggregationError(f"{where} has names that were not broadcast: {unknown}")
        for name in names:
            tensor, base = update[name], None if self._base is None else self._base[name]
            check_like(name, self._like.get(name, tensor if base is None else base), tensor, where)
            scales = factor is not None and averages_as_float(name, tensor)
            words = fixed_point_words(
                name,
                tensor,
                base,
                weight,
                fraction_bits=self._fraction_bits_of(name),
                num_clients=self._num_clients,
                factor=factor(name, tensor) if factor is not None and scales else 1.0,
                largest=weight << (_NARROW_BITS - self._total_bits) if name in self._narrow else None,
            )
            if name in self._words:
                self._words[name] += words
            else:
                self._words[name], self._like[name] = words, torch.empty_like(tensor, device="meta")
            del tensor
        self._count, self._weight = self._count + 1, self._weight + weight
        self._require_room()

    def merge(self, other: Self) -> None:
        """Add the sum of other clients, made with the same base, scale and number of clients."""
        if not other._count:
            return
        check_names(self._words.keys() if self._count else other._words.keys(), other._words.keys(), "a partial sum")
        for name, words in other._words.items():
            self._words[name] = self._words[name] + words if name in self._words else words.clone()
        self._like |= other._like
        self._count, self._weight = self._count + other._count, self._weight + other._weight
        self._require_room()

    @property
    def weight(self) -> int:
        """The sum of the weights."""
        return self._weight

    def _fraction_bits_of(self, name: str) -> int:
        if name not in self._narrow or self._base is None:
            return self._fraction_bits
        if name not in self._exponents:
            largest = float(self._base[name].abs().max()) if self._base[name].numel() else 0.0
            self._exponents[name] = max(_SMALLEST_EXPONENT, math.frexp(largest)[1])
        return _NARROW_BITS - self._total_bits - self._exponents[name] - _HEADROOM_BITS

    def vector(self) -> Tensor:
        """Return the sum of the weights and then all words, in name order, as one int64 vector.

        Words of 32 bits come last, two in each word of 64 bits.
        """
        weight, words = torch.tensor([self._weight]), sorted(self._words.items())
        wide = [each.flatten().cpu() for name, each in words if name not in self._narrow]
        halves = [each.flatten().cpu() for name, each in words if name in self._narrow]
        return torch.cat([weight, *wide, *([_paired(torch.cat(halves))] if halves else [])])

    def num_words(self, like: Mapping[str, Tensor]) -> int:
        """Return the length of `vector()` for updates with these shapes."""
        num_narrow = sum(tensor.numel() for name, tensor in like.items() if name in self._narrow)
        return 1 + sum(tensor.numel() for tensor in like.values()) - num_narrow // 2

    def take(self, vector: Tensor, like: Mapping[str, Tensor], num_clients: int) -> Tensor:
        """Become the sum with which `vector` begins, and return the rest of it.

        Args:
            vector: int64 (N,), begins with the sum of what `vector()` returned for `num_clients` clients.
            like: a tensor of the dtype and shape of each update's, by name. Only these are read.
            num_clients: how many clients are in the sum.

        Raises AggregationError if the vector is too short, or its weight is not positive.
        """
        size = self.num_words(like)
        if vector.numel() < size:
            raise AggregationError(f"a sum of {size} words was cut to {vector.numel()}")
        wide = [name for name in sorted(like) if name not in self._narrow]
        halves = [name for name in sorted(like) if name in self._narrow]
        sizes = [like[name].numel() for name in wide]
        weight, *pieces, pairs, rest = torch.split(vector, [1, *sizes, size - 1 - sum(sizes), vector.numel() - size])
        if int(weight) < 1:
            raise AggregationError(f"the weights of {num_clients} clients add up to {int(weight)}: it must be positive")
        self._words = {name: piece.view(like[name].shape) for name, piece in zip(wide, pieces, strict=True)}
        sizes = [like[name].numel() for name in halves]
        for name, piece in zip(halves, torch.split(_unpaired(pairs, sum(sizes)), sizes), strict=True):
            self._words[name] = piece.view(like[name].shape)
        # empty_like of a tensor that is on this device already would import sympy, which takes a second and 35 MB
        self._like = {name: torch.empty(each.shape, dtype=each.dtype, device="meta") for name, each in like.items()}
        self._count, self._weight = num_clients, int(weight)
        self._require_room()
        return rest

    def mean(self) -> dict[str, Tensor]:
        """Return base + words / (weight 2^f), rounded to each tensor's dtype; integer tensors are rounded half to even.

        Raises AggregationError if nothing was added, and OutOfRange if the total weight is beyond that of the scales of
        words of 32 bits.
        """
        if not self._count:
            raise AggregationError("there are no updates")
        narrow = sorted(self._narrow.intersection(self._words))
        if narrow and self._weight > 1 << self._total_bits:
            most = 1 << self._total_bits
            raise OutOfRange(narrow[0], f"the weights of all clients are more than its 32-bit words carry: {most}")
        return {name: self._decoded(name, words) for name, words in sorted(self._words.items())}

    def _decoded(self, name: str, words: Tensor) -> Tensor:
        like, base = self._like[name], None if self._base is None else self._base[name]
        if like.is_floating_point():
            exact = words.double() / math.ldexp(float(self._weight), self._fraction_bits_of(name))
            return rounded(exact if base is None else exact + base.double(), like.dtype)
        floor = words.div(self._weight, rounding_mode="floor")
        rest = 2 * (words - floor * self._weight)
        lower = floor if base is None else floor + base.to(torch.int64)
        is_above = (rest > self._weight) | ((rest == self._weight) & (lower % 2 == 1))
        return (lower + is_above.long()).to(like.dtype)

    def _require_room(self) -> None:
        if self._count > self._num_clients:
            raise AggregationError(f"{self._count} clients were added to a sum that has room for {self._num_clients}")


def fixed_point_mean(
    updates: Iterable[Mapping[str, Tensor]],
    weights: Sequence[float],
    base: Mapping[str, Tensor] | None,
    *,
    fraction_bits: int = COUNTED_BITS,
    factor: Factor | None = None,
    narrow: NarrowWords | None = None,
) -> dict[str, Tensor]:
    """Return the weighted mean of every tensor over the updates, by integers on a public scale.

        mean = base + 2^-f / W sum_k rint((a_k x_k - base) w_k 2^f),    W = sum_k w_k

    Each client's term depends on nothing of another client, and their sum is exact: the mean has the same bits in any
    order and for any tree of partial sums. Its error is at most K 2^-(f+1) / W from the K roundings, the rounding of
    the differences to float64, and one rounding to the tensor's dtype. Integer tensors are averaged exactly and rounded
    half to even.

    Args:
        updates: mappings from names to tensors, consumed once and one at a time.
        weights: a positive whole number for each update.
        base: the tensors that were broadcast, by the same names (it may have others), with the same dtypes and shapes;
            None stands for zeros.
        fraction_bits: f, `COUNTED_BITS`, or `EQUAL_BITS` if all weights are 1.
        factor: returns a_k for a floating-point tensor, by its name and the tensor; None stands for 1.
        narrow: the tensors with words of 32 bits, whose f depends on the base; None stands for none.

    Returns:
        The mean of each tensor, in name order, with the dtypes and shapes of the updates.

    Raises:
        OutOfRange: a value does not fit into its word; the message names the tensor.
        AggregationError: as `weighted_mean`.

    Example:
        >>> import torch
        >>> base = {"w": torch.tensor([1.0]), "steps": torch.tensor(0)}
        >>> updates = [{"w": torch.tensor([2.0]), "steps": torch.tensor(3)},
        ...            {"w": torch.tensor([6.0]), "steps": torch.tensor(4)}]
        >>> fixed_point_mean(updates, [3, 1], base)
        {'steps': tensor(3), 'w': tensor([3.])}

    Reference: FedAvg (McMahan et al. 2017), Algorithm 1, in the fixed point of secure aggregation (Bonawitz et al.
    2017), without its clipping.
    """
    numbers = whole_weights(weights)
    total = FixedPointSum(base, fraction_bits=fraction_bits, num_clients=len(weights), narrow=narrow)
    count = 0
    with torch.no_grad():
        for update in updates:
            if count == len(weights):
                raise AggregationError(f"there are more updates than the {len(weights)} weights")
            total.add(update, numbers[count], factor)
            count += 1
            del update  # before the next one is opened: an update may be as large as memory allows
    if 0 < count < len(weights):
        raise AggregationError(f"there are {count} updates for {len(weights)} weights")
    return total.mean()
