"""Fixed-point means: hand calculations, the error bound, values out of range, and refused inputs."""

import itertools
from fractions import Fraction

import numpy as np
import pytest
import torch
from torch import Tensor

from fedssl.aggregation import AggregationError, OutOfRange, fixed_point_mean, weighted_mean
from fedssl.aggregation.fixed_point import (
    COUNTED_BITS,
    EQUAL_BITS,
    FixedPointSum,
    NarrowWords,
    TotalBits,
    fixed_point_words,
    largest_word,
)
from fedssl.aggregation.layerwise import capped_cosines

FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]


def normal(*shape: int, seed: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> Tensor:
    drawn = torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (drawn * scale).to(dtype)


def test_fixed_point_mean_matches_a_hand_calculation() -> None:
    # Differences 1 and 5, times 3 and 1: (3 + 5)/4 = 2 more than the broadcast. 10 + (3 * 1 + 1 * 7)/4 = 12.5: 12.
    base = {"w": torch.tensor([1.0]), "steps": torch.tensor(10), "other": torch.tensor(0.0)}
    updates = [
        {"w": torch.tensor([2.0]), "steps": torch.tensor(11)},
        {"w": torch.tensor([6.0]), "steps": torch.tensor(17)},
    ]
    mean = fixed_point_mean(updates, [3, 1], base)
    assert list(mean) == ["steps", "w"]
    assert mean["w"].tolist() == [3.0]
    assert mean["steps"].item() == 12
    assert (mean["w"].dtype, mean["steps"].dtype) == (torch.float32, torch.int64)


def test_fixed_point_words_match_a_hand_calculation() -> None:
    # With two fractional bits, 0.3 * 3 * 4 = 3.6 becomes 4 and -0.125 * 3 * 4 = -1.5 becomes -2 (half to even).
    x, base = torch.tensor([1.3, 0.875, 1.0], dtype=torch.float64), torch.ones(3, dtype=torch.float64)
    assert fixed_point_words("w", x, base, 3, fraction_bits=2, num_clients=5).tolist() == [4, -2, 0]
    assert fixed_point_words("w", x, None, 1, fraction_bits=1, num_clients=5, factor=0.5).tolist() == [1, 1, 1]
    integers = torch.tensor([7, -3], dtype=torch.int16)
    assert fixed_point_words("n", integers, None, 3, fraction_bits=24, num_clients=5, factor=0.5).tolist() == [21, -9]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("bits", "weights"), [(COUNTED_BITS, [13, 1, 250, 42, 8, 99, 1000]), (EQUAL_BITS, [1] * 7)])
def test_the_mean_is_within_the_error_bound_of_the_exact_mean(
    dtype: torch.dtype, bits: int, weights: list[int]
) -> None:
    base = normal(3, 5, seed=100, dtype=dtype)
    updates = [normal(3, 5, seed=k, dtype=dtype) for k in range(7)]
    mean = fixed_point_mean([{"w": x} for x in updates], weights, {"w": base}, fraction_bits=bits)["w"]
    assert mean.dtype == dtype
    for index in np.ndindex(3, 5):
        exact = sum(w * Fraction(float(u[index])) for w, u in zip(weights, updates, strict=True)) / sum(weights)
        unit = torch.finfo(dtype).eps * abs(float(exact))
        bound = 7 * 2.0 ** -(bits + 1) / sum(weights) + unit * 0.5 + 1e-14
        assert abs(Fraction(float(mean[index])) - exact) <= bound


@pytest.mark.parametrize("dtype", INTEGERS)
def test_integers_are_exact_and_rounded_half_to_even(dtype: torch.dtype) -> None:
    base = {"n": torch.tensor([0, 3, 50, 100], dtype=dtype)}
    updates = [{"n": torch.tensor(values, dtype=dtype)} for values in ([0, 4, 51, 101], [1, 5, 54, 102])]
    # The means are 0.5, 4.5, 52.5 and 101.5.
    mean = fixed_point_mean(updates, [2, 2], base)["n"]
    assert mean.dtype == dtype
    assert mean.tolist() == [0, 4, 52, 102]


def test_negative_integers_are_rounded_half_to_even() -> None:
    updates = [{"n": torch.tensor([-1, -2, -8])}, {"n": torch.tensor([0, -1, -5])}]
    assert fixed_point_mean(updates, [1, 1], None)["n"].tolist() == [0, -2, -6]  # -0.5, -1.5, -6.5


@pytest.mark.parametrize("num_clients", [10, 100, 1000])
def test_the_mean_is_at_least_as_close_as_a_float32_mean(num_clients: int) -> None:
    """Compares the largest error against a float64 mean, for typical sizes of clients and updates."""
    generator = np.random.default_rng(num_clients)
    weights = [int(w) for w in generator.integers(60, 4040, num_clients)]
    base = normal(2000, seed=1, scale=0.1)
    updates = [base + normal(2000, seed=2 + k, scale=0.01) for k in range(num_clients)]
    exact = np.average(np.stack([u.double().numpy() for u in updates]), axis=0, weights=np.array(weights, float))
    total = torch.zeros(2000, dtype=torch.float64)
    fixed = FixedPointSum({"w": base}, fraction_bits=COUNTED_BITS, num_clients=num_clients)
    plain = torch.zeros(2000)
    for update, weight in zip(updates, weights, strict=True):
        fixed.add({"w": update}, weight)
        plain += update * weight
        total += (update.double() - base.double()) * weight
    half_unit = float(np.spacing(np.abs(exact).astype(np.float32)).max()) / 2
    error = float(np.abs(fixed.mean()["w"].double().numpy() - exact).max())
    assert error <= half_unit + num_clients * 2.0**-25 / sum(weights) + 1e-15
    assert error <= float(np.abs((plain / sum(weights)).double().numpy() - exact).max())


def test_every_order_of_updates_gives_the_same_bits() -> None:
    base = {"w": normal(4000, seed=9)}
    updates = [{"w": normal(4000, seed=k)} for k in range(4)]
    weights = [3, 11, 2, 7]
    results = []
    for order in itertools.permutations(range(4)):
        chosen = [updates[k] for k in order]
        results.append(fixed_point_mean(chosen, [weights[k] for k in order], base)["w"])
    assert all(torch.equal(result, results[0]) for result in results)


def test_a_value_out_of_range_names_its_tensor_and_is_not_clipped() -> None:
    base = {"a": torch.zeros(2), "encoder.bn.running_var": torch.ones(3)}
    fits = 2.0**53 / 10 / 2.0**COUNTED_BITS
    good = {"a": torch.ones(2), "encoder.bn.running_var": torch.tensor([fits * 0.999, 1.0, 1.0])}
    assert fixed_point_mean([good], [10], base)["encoder.bn.running_var"][0] == good["encoder.bn.running_var"][0]
    bad = {"a": torch.ones(2), "encoder.bn.running_var": torch.tensor([1.0, -fits * 1.001, 1.0])}
    with pytest.raises(OutOfRange, match=r"encoder\.bn\.running_var: a value is 5.374\d*e\+07 from the broadcast") as e:
        fixed_point_mean([good, bad], [10, 10], base)
    assert e.value.tensor == "encoder.bn.running_var"


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_values_that_are_not_finite_are_out_of_range(value: float) -> None:
    with pytest.raises(OutOfRange, match="w: a value is not finite"):
        fixed_point_mean([{"w": torch.tensor([0.0, value])}], [1], None)


def test_integers_whose_difference_overflows_are_out_of_range() -> None:
    limits = torch.iinfo(torch.int64)
    with pytest.raises(OutOfRange, match="n: a value is"):
        fixed_point_mean([{"n": torch.tensor([limits.max])}], [1], {"n": torch.tensor([limits.min])})


@pytest.mark.parametrize("num_clients", [1, 2, 1023, 1024, 100_000])
def test_the_largest_words_of_all_clients_fit_into_64_bits(num_clients: int) -> None:
    assert num_clients * largest_word(num_clients) < 1 << 63
    assert largest_word(num_clients) <= 1 << 53


def test_the_factor_scales_only_floating_point_tensors() -> None:
    base = {"w": torch.tensor([2.0, 0.0]), "n": torch.tensor([4])}
    updates = [{"w": torch.tensor([2.0, 0.0]), "n": torch.tensor([6])}, {"w": torch.tensor([0.0, 2.0]), "n": base["n"]}]
    factor = capped_cosines(base, lambda name: False)  # cosines 1 and 0
    mean = fixed_point_mean(updates, [1, 1], base, fraction_bits=EQUAL_BITS, factor=factor)
    assert mean["w"].tolist() == [1.0, 0.0]
    assert mean["n"].tolist() == [5]


def test_differences_are_averaged_without_a_broadcast() -> None:
    updates = [{"c": torch.tensor([0.25, -1.0])}, {"c": torch.tensor([0.75, 3.0])}]
    assert fixed_point_mean(updates, [1, 1], None, fraction_bits=EQUAL_BITS)["c"].tolist() == [0.5, 1.0]


def test_updates_are_consumed_one_at_a_time() -> None:
    alive = []

    def updates() -> object:
        for seed in range(3):
            update = {"w": normal(10, seed=seed)}
            alive.append(seed)
            yield update

    mean = fixed_point_mean(updates(), [1, 2, 3], None)  # type: ignore[arg-type]
    expected = weighted_mean([{"w": normal(10, seed=seed)} for seed in range(3)], [1, 2, 3])
    assert alive == [0, 1, 2]
    torch.testing.assert_close(mean["w"], expected["w"], atol=1e-7, rtol=0)


@pytest.mark.parametrize(
    ("updates", "weights", "base", "message"),
    [
        ([], [], None, "there are no updates"),
        ([{"w": torch.ones(1)}], [0], None, "weight 0 must be positive"),
        ([{"w": torch.ones(1)}], [1.5], None, "must be a whole number, not 1.5"),
        ([{"w": torch.ones(1)}], [1, 1], None, "there are 1 updates for 2 weights"),
        ([{"w": torch.ones(1)}] * 2, [1], None, "there are more updates than the 1 weights"),
        ([{"w": torch.ones(1)}, {"v": torch.ones(1)}], [1, 1], None, r"missing \['w'\], unexpected \['v'\]"),
        ([{"w": torch.ones(1)}], [1], {"v": torch.ones(1)}, r"names that were not broadcast: \['w'\]"),
        ([{"w": torch.ones(1)}], [1], {"w": torch.ones(2)}, r"has w as torch.float32 \(1,\), not torch.float32 \(2,\)"),
        ([{"w": torch.ones(1)}, {"w": torch.ones(2)}], [1, 1], None, r"update 1 has w as torch.float32 \(2,\)"),
        ([{"w": torch.ones(1, dtype=torch.bool)}], [1], None, "there is no mean of torch.bool"),
    ],
)
def test_inputs_that_cannot_be_combined_are_refused(
    updates: list[dict[str, Tensor]], weights: list[float], base: dict[str, Tensor] | None, message: str
) -> None:
    with pytest.raises(AggregationError, match=message):
        fixed_point_mean(updates, weights, base)


def test_a_sum_refuses_more_clients_than_it_has_room_for() -> None:
    total = FixedPointSum(None, fraction_bits=COUNTED_BITS, num_clients=1)
    total.add({"w": torch.ones(1)}, 1)
    with pytest.raises(AggregationError, match="2 clients were added to a sum that has room for 1"):
        total.add({"w": torch.ones(1)}, 1)


def test_words_of_32_bits_match_a_hand_calculation() -> None:
    # The largest value is below 2^1, and the weights add up to at most 2^4: f = 30 - 4 - (1 + 2) = 23. The words are
    # 0.25 * 3 * 2^23 = 6291456, -0.5 * 3 * 2^23 = -12582912 and 0, and the first shares its word with the third.
    base, x = {"w": torch.tensor([[1.5], [0.5], [0.0]])}, {"w": torch.tensor([[1.75], [0.0], [0.0]])}
    narrow = NarrowWords({"w"}, TotalBits(weights=4, clients=1))
    total = FixedPointSum(base, fraction_bits=COUNTED_BITS, num_clients=2, narrow=narrow)
    total.add(x, 3)
    assert total.vector().tolist() == [3, 6291456, -12582912]
    total.add({"w": torch.tensor([[1.5], [0.5], [-1.0]])}, 5)  # -1 * 5 * 2^23
    assert total.vector().tolist() == [8, 6291456 - 41943040 * 2**32, -12582912]
    assert total.mean()["w"].tolist() == [[1.59375], [0.3125], [-0.625]]
    taken = FixedPointSum(base, fraction_bits=COUNTED_BITS, num_clients=2, narrow=narrow)
    rest = taken.take(torch.cat([total.vector(), torch.tensor([7])]), x, 2)
    assert (rest.tolist(), taken.mean()["w"].tolist()) == ([7], total.mean()["w"].tolist())
    equal = FixedPointSum(base, fraction_bits=EQUAL_BITS, num_clients=2, narrow=narrow)
    equal.add(x, 1)  # the weights add up to at most 2^1: f = 26
    assert equal.vector().tolist() == [1, 2**24, -(2**25)]


def test_values_too_large_for_32_bit_words_are_refused_rather_than_wrapped() -> None:
    base, narrow = {"w": torch.zeros(2, 2)}, NarrowWords({"w"}, TotalBits(weights=3, clients=2))
    base["w"][0, 0] = -0.75  # below 2^0: each value may move by up to 2^2
    moved = {"w": base["w"] + 4}
    mean = fixed_point_mean([moved, moved], [3, 5], base, narrow=narrow)
    assert torch.equal(mean["w"], moved["w"])
    for changed in (4.001, float("inf")):
        with pytest.raises(OutOfRange, match="w: a value is"):
            fixed_point_mean([{"w": base["w"] + changed}], [1], base, narrow=narrow)
    with pytest.raises(OutOfRange, match="w: the weights of all clients are more than its 32-bit words carry: 8"):
        fixed_point_mean([moved, moved], [4, 5], base, narrow=narrow)
    with pytest.raises(OutOfRange, match="carry: 4"):
        fixed_point_mean([moved] * 5, [1] * 5, base, fraction_bits=EQUAL_BITS, narrow=narrow)


def test_total_bits_match_hand_calculations() -> None:
    assert TotalBits.after(64, 3) == TotalBits(7, 3)  # 128 = 2^7 and 6 < 2^3
    assert TotalBits.after(65, 4) == TotalBits(8, 3)
    assert TotalBits.after(2**25, 2) == TotalBits(26, 2)
    assert TotalBits.after(2**25 + 1, 2) is None
    assert TotalBits.after(0, 2) is None
