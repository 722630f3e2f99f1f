"""Means in fixed point are exact for all updates, in any order and for any tree of partial sums."""

from fractions import Fraction

import numpy as np
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from torch import Tensor

from fedssl.aggregation import fixed_point_mean
from fedssl.aggregation.fixed_point import COUNTED_BITS, EQUAL_BITS, FixedPointSum, NarrowWords, TotalBits

Update = dict[str, Tensor]

quick = settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow])
numbers = st.floats(-1e4, 1e4, width=32)
whole = st.integers(-(2**31), 2**31 - 1)


@st.composite
def cohorts(draw: st.DrawFn) -> tuple[Update, list[Update], list[int], int]:
    """Draw a broadcast, 1 to 9 updates to it, their weights, and the number of fraction bits."""
    count, width = draw(st.integers(1, 9)), draw(st.integers(1, 6))

    def tensors() -> Update:
        floats = draw(arrays.arrays(np.float32, width, elements=numbers))
        integers = draw(arrays.arrays(np.int64, width, elements=whole))
        return {"w": torch.from_numpy(floats), "n": torch.from_numpy(integers)}

    bits = draw(st.sampled_from([COUNTED_BITS, 32]))
    weights = st.integers(1, 1000) if bits == COUNTED_BITS else st.just(1)
    return tensors(), [tensors() for _ in range(count)], draw(st.lists(weights, min_size=count, max_size=count)), bits


def total_of(tree: list[list[int]], cohort: tuple[Update, list[Update], list[int], int]) -> FixedPointSum:
    """Add up the updates of each branch, and merge each sum into the total."""
    base, updates, weights, bits = cohort
    total = FixedPointSum(base, fraction_bits=bits, num_clients=len(updates))
    for branch in tree:
        part = FixedPointSum(base, fraction_bits=bits, num_clients=len(updates))
        for index in branch:
            part.add(updates[index], weights[index])
        total.merge(part)
    return total


@quick
@given(cohorts(), st.data())
def test_any_order_and_any_tree_of_partial_sums_gives_the_same_bits(
    cohort: tuple[Update, list[Update], list[int], int], data: st.DataObject
) -> None:
    base, updates, weights, bits = cohort
    order = data.draw(st.permutations(range(len(updates))))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(updates)), max_size=4)))
    tree = [list(order[a:b]) for a, b in zip([0, *cuts], [*cuts, len(updates)], strict=True)]
    expected = fixed_point_mean(updates, weights, base, fraction_bits=bits)
    found = total_of(tree, cohort).mean()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@quick
@given(cohorts())
def test_the_mean_is_the_exact_one_up_to_the_documented_error(
    cohort: tuple[Update, list[Update], list[int], int],
) -> None:
    base, updates, weights, bits = cohort
    mean, total = fixed_point_mean(updates, weights, base, fraction_bits=bits), sum(weights)
    for index in range(len(base["w"])):
        exact = sum(w * Fraction(float(u["w"][index])) for w, u in zip(weights, updates, strict=True)) / total
        rounding = Fraction(float(np.spacing(np.float32(abs(float(exact)))))) / 2
        bound = Fraction(len(updates), total) / 2 ** (bits + 1) + rounding + Fraction(1, 10**10)
        assert abs(Fraction(float(mean["w"][index])) - exact) <= bound
        whole_sum = sum(w * int(u["n"][index]) for w, u in zip(weights, updates, strict=True))
        assert int(mean["n"][index]) == round(Fraction(whole_sum, total))  # half to even, like Python's round


@quick
@given(cohorts())
def test_unchanged_updates_give_the_broadcast(cohort: tuple[Update, list[Update], list[int], int]) -> None:
    base, updates, weights, _ = cohort
    for bits in (COUNTED_BITS, EQUAL_BITS):
        mean = fixed_point_mean([base] * len(updates), weights, base, fraction_bits=bits)
        assert all(torch.equal(mean[name], base[name]) for name in base)


@quick
@given(st.integers(1, 40), st.integers(1, 5), st.sampled_from([COUNTED_BITS, EQUAL_BITS]), st.data())
def test_words_of_32_bits_have_the_same_bits_in_a_sum_of_vectors(
    count: int, width: int, fraction: int, data: st.DataObject
) -> None:
    values = arrays.arrays(np.float32, (width, 1), elements=st.floats(-0.875, 0.875, width=32))
    base = {"m": torch.from_numpy(data.draw(values)), "v": torch.from_numpy(data.draw(values))}
    base["m"][0] = 0.75  # so that every value may move by up to 2^2
    moves = data.draw(arrays.arrays(np.float32, (count, width, 1), elements=st.floats(-3.5, 3.5, width=32)))
    updates = [{"m": base["m"] + move, "v": base["v"]} for move in torch.from_numpy(moves)]
    weight = st.just(1) if fraction == EQUAL_BITS else st.integers(1, 10_000)
    weights = data.draw(st.lists(weight, min_size=count, max_size=count))
    bits = TotalBits((sum(weights) - 1).bit_length(), (count - 1).bit_length())
    narrow = NarrowWords({"m"}, bits)
    mean = fixed_point_mean(updates, weights, base, fraction_bits=fraction, narrow=narrow)
    vectors = []
    for update, each in zip(updates, weights, strict=True):
        one = FixedPointSum(base, fraction_bits=fraction, num_clients=count, narrow=narrow)
        one.add(update, each)
        vectors.append(one.vector())
    total = FixedPointSum(base, fraction_bits=fraction, num_clients=count, narrow=narrow)
    assert vectors[0].numel() == total.num_words(base) == 1 + width + (width + 1) // 2
    total.take(torch.stack(vectors).sum(dim=0), base, count)
    assert all(torch.equal(total.mean()[name], mean[name]) for name in base)
    num_bits = 28 - (bits.clients if fraction == EQUAL_BITS else bits.weights)
    for index in range(width):
        exact = sum(w * Fraction(float(u["m"][index])) for w, u in zip(weights, updates, strict=True)) / sum(weights)
        rounding = Fraction(float(np.spacing(np.float32(abs(float(exact)))))) / 2
        bound = Fraction(count, sum(weights)) / Fraction(2) ** (num_bits + 1) + rounding + Fraction(1, 10**10)
        assert abs(Fraction(float(mean["m"][index])) - exact) <= bound
