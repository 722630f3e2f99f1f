"""The weighted mean: hand calculations, exactness, refused inputs, and streaming."""

import gc
import math
import weakref
from collections.abc import Iterator, Mapping
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import safetensors
import safetensors.torch
import torch
from torch import Tensor

from fedssl.aggregation import AggregationError, weighted_mean
from fedssl.aggregation import mean as mean_module
from support.tensors import standard_normal

FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]


def test_weighted_mean_matches_a_hand_calculation() -> None:
    # (3 * 1 + 1 * 5)/4 = 2 and (3 * 2 + 1 * -2)/4 = 1; (3 * 10 + 1 * 20)/4 = 12.5 becomes 12 (half to even).
    updates = [
        {"w": torch.tensor([1.0, 2.0]), "steps": torch.tensor(10)},
        {"w": torch.tensor([5.0, -2.0]), "steps": torch.tensor(20)},
    ]
    mean = weighted_mean(updates, [3, 1])
    assert list(mean) == ["steps", "w"]
    assert mean["w"].tolist() == [2.0, 1.0]
    assert mean["w"].dtype == torch.float32
    assert mean["steps"].item() == 12
    assert mean["steps"].dtype == torch.int64


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("dtype", FLOATS)
def test_the_result_is_the_exact_mean_rounded_once(seed: int, dtype: torch.dtype) -> None:
    updates = [standard_normal(3, 5, seed=10 * seed + k, dtype=dtype) for k in range(7)]
    weights = [13, 1, 250, 42, 8, 99, 1000]
    mean = weighted_mean([{"w": update} for update in updates], weights)["w"]
    assert mean.dtype == dtype
    assert mean.shape == (3, 5)
    for index in np.ndindex(3, 5):
        exact = sum(w * Fraction(float(u[index])) for w, u in zip(weights, updates, strict=True)) / sum(weights)
        # One rounding of at most half a unit in the last place, plus the error of the float64 sum.
        unit = torch.finfo(dtype).eps * max(abs(float(exact)), float(torch.finfo(dtype).tiny))
        assert abs(Fraction(float(mean[index])) - exact) <= unit * 0.5 + 1e-14


@pytest.mark.parametrize("dtype", FLOATS)
def test_equal_updates_are_returned_unchanged(dtype: torch.dtype) -> None:
    update = {"w": standard_normal(1000, seed=0, dtype=dtype)}
    for weights in ([0.1, 0.2, 0.3], [1] * 7, [1e-300, 1.0, 1e300], [math.pi, math.e]):
        assert torch.equal(weighted_mean([update] * len(weights), weights)["w"], update["w"])


@pytest.mark.parametrize("dtype", INTEGERS)
def test_equal_integers_are_returned_unchanged(dtype: torch.dtype) -> None:
    update = {"n": torch.tensor([torch.iinfo(dtype).min, 0, 7, torch.iinfo(dtype).max], dtype=dtype)}
    mean = weighted_mean([update] * 3, [0.1, 0.2, 0.7])["n"]
    assert mean.dtype == dtype
    assert torch.equal(mean, update["n"])


@pytest.mark.parametrize(
    ("values", "weights", "expected"),
    [
        ([1, 2], [1, 1], 2),  # 1.5
        ([2, 3], [1, 1], 2),  # 2.5
        ([-1, -2], [1, 1], -2),  # -1.5
        ([-3, -2], [1, 1], -2),  # -2.5
        ([0, 1], [1, 1], 0),  # 0.5
        ([1, 2, 1, 2], [1, 1, 1, 1], 2),  # 1.5, computed from 4/3
        ([1, 2], [2, 1], 1),  # 1.33
        ([1, 2], [1, 2], 2),  # 1.67
        ([100, 103, 101], [1, 1, 1], 101),  # 101.33
    ],
)
def test_integers_round_half_to_even(values: list[int], weights: list[int], expected: int) -> None:
    updates = [{"n": torch.tensor(value)} for value in values]
    assert weighted_mean(updates, weights)["n"].item() == expected


def test_a_bfloat16_mean_is_not_rounded_twice() -> None:
    # 1 + 2^-8 is a tie between 1 and 1 + 2^-7 and is rounded to the even 1. A slightly larger value is rounded up.
    # Float32 loses the difference.
    hair = 2.0**-40
    updates = [{"w": torch.tensor([1.0, -1.0], dtype=torch.bfloat16)}, {"w": torch.tensor([2.0, -2.0]).bfloat16()}]
    share = 2.0**-8 + hair
    above = weighted_mean(updates, [1 - share, share])["w"]
    assert above.tolist() == [1 + 2.0**-7, -1 - 2.0**-7]
    tie = weighted_mean(updates, [1 - 2.0**-8, 2.0**-8])["w"]
    assert tie.tolist() == [1.0, -1.0]
    # 1 + 3 * 2^-8 is a tie that is rounded up to the even 1 + 2^-6. A slightly smaller value must not be.
    share = 3 * 2.0**-8 - hair
    below = weighted_mean(updates, [1 - share, share])["w"]
    assert below.tolist() == [1 + 2.0**-7, -1 - 2.0**-7]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_rounding_agrees_with_a_search_over_all_neighbours(dtype: torch.dtype) -> None:
    exact = torch.cat(
        [standard_normal(2000, seed=0), standard_normal(500, seed=1) * 1e-6, standard_normal(500, seed=2) * 1e-40]
    )
    nearest = exact.to(dtype)
    bits = nearest.view(torch.int16)
    candidates = torch.stack([(bits + shift).view(dtype).double() for shift in (-1, 0, 1)])
    candidates = torch.where(candidates.isnan(), torch.inf, candidates)
    best = (candidates - exact).abs().min(dim=0).values
    assert torch.equal((mean_module.rounded(exact, dtype).double() - exact).abs(), best)


def test_values_that_are_not_finite_stay_not_finite() -> None:
    special = torch.tensor([torch.inf, -torch.inf, torch.nan, 1.0])
    for dtype in FLOATS:
        updates = [{"w": special.to(dtype)}, {"w": torch.zeros(4, dtype=dtype)}]
        for order in (updates, updates[::-1], updates[:1]):
            mean = weighted_mean(order, [1.0] * len(order))["w"]
            assert mean.isfinite().tolist() == [False, False, False, True]


def test_the_order_of_names_and_the_memory_layout_have_no_influence() -> None:
    w = standard_normal(4, 3, seed=0)
    updates = [{"b": torch.ones(0), "a": w.T.contiguous().T}, {"a": w + 1, "b": torch.ones(0)}]
    mean = weighted_mean(updates, [1, 1])
    assert list(mean) == ["a", "b"]
    assert mean["b"].shape == (0,)
    torch.testing.assert_close(mean["a"], w + 0.5)


def test_a_result_shares_no_memory_with_the_updates_and_has_no_gradient() -> None:
    update = {"w": torch.ones(3, requires_grad=True), "n": torch.ones(3, dtype=torch.int64)}
    mean = weighted_mean([update], [1])
    assert not mean["w"].requires_grad
    mean["w"] += 1
    mean["n"] += 1
    assert torch.equal(update["w"], torch.ones(3))
    assert torch.equal(update["n"], torch.ones(3, dtype=torch.int64))


def test_a_tensor_averaged_in_pieces_is_put_together(monkeypatch: pytest.MonkeyPatch) -> None:
    updates = [{"w": standard_normal(5, 7, seed=k)} for k in range(3)]
    whole = weighted_mean(updates, [1, 2, 3])["w"]
    monkeypatch.setitem(mean_module.chunks.__kwdefaults__, "size", 4)
    assert torch.equal(weighted_mean(updates, [1, 2, 3])["w"], whole)


class Watched(Mapping[str, Tensor]):
    """An update that creates its tensors on access, and counts those that are alive."""

    alive = 0
    most = 0

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def __getitem__(self, name: str) -> Tensor:
        tensor = torch.full((10,), float(self.seed))
        Watched.alive += 1
        Watched.most = max(Watched.most, Watched.alive)
        weakref.finalize(tensor, Watched.gone)
        return tensor

    @staticmethod
    def gone() -> None:
        Watched.alive -= 1

    def __iter__(self) -> Iterator[str]:
        return iter(["a", "b", "c"])

    def __len__(self) -> int:
        return 3


def test_updates_are_read_one_by_one_and_their_tensors_released() -> None:
    opened: list[int] = []

    def updates() -> Iterator[Watched]:
        for seed in range(5):
            assert Watched.alive == 0  # the previous update was released first
            opened.append(seed)
            yield Watched(seed)

    mean = weighted_mean(updates(), [1] * 5)
    gc.collect()
    assert opened == [0, 1, 2, 3, 4]
    assert Watched.most == 1
    assert mean["b"].tolist() == [2.0] * 10


def test_memory_mapped_files_are_averaged(tmp_path: Path) -> None:
    for k in range(3):
        safetensors.torch.save_file(
            {"w": torch.full((4,), float(k)), "n": torch.tensor(k)}, tmp_path / f"{k}.safetensors"
        )

    class Lazy(Mapping[str, Tensor]):
        def __init__(self, path: Path) -> None:
            self.file = safetensors.safe_open(path, "pt")

        def __getitem__(self, name: str) -> Tensor:
            return self.file.get_tensor(name)

        def __iter__(self) -> Iterator[str]:
            return iter(self.file.keys())

        def __len__(self) -> int:
            return len(self.file.keys())

    mean = weighted_mean((Lazy(tmp_path / f"{k}.safetensors") for k in range(3)), [1, 1, 2])
    assert mean["w"].tolist() == [1.25] * 4
    assert mean["n"].item() == 1


ONE = {"w": torch.ones(2)}


@pytest.mark.parametrize(
    ("updates", "weights", "message"),
    [
        ([], [], "there are no updates"),
        ([], [1.0], "there are no updates"),
        ([ONE], [], "more updates than the 0 weights"),
        ([ONE, ONE], [1], "more updates than the 1 weights"),
        ([ONE], [1, 1], "1 updates for 2 weights"),
        ([ONE, ONE], [1, 0], "weight 1 must be positive and finite, not 0.0"),
        ([ONE, ONE], [-1, 1], "weight 0 must be positive"),
        ([ONE, ONE], [1, math.nan], "weight 1 must be positive"),
        ([ONE, ONE], [math.inf, 1], "weight 0 must be positive"),
        ([ONE, ONE], [1e308, 1e308], "sum of the weights"),
        ([ONE, {"v": torch.ones(2)}], [1, 1], r"update 1 has other names: missing \['w'\], unexpected \['v'\]"),
        ([ONE, {**ONE, "v": torch.ones(2)}], [1, 1], r"unexpected \['v'\]"),
        ([ONE, {"w": torch.ones(3)}], [1, 1], r"update 1 has w as torch.float32 \(3,\), not torch.float32 \(2,\)"),
        ([ONE, {"w": torch.ones(2, 1)}], [1, 1], "update 1 has w as"),
        ([ONE, {"w": torch.ones(2).double()}], [1, 1], "update 1 has w as torch.float64"),
        ([{"w": torch.ones(2, dtype=torch.bool)}], [1], "w: there is no mean of torch.bool"),
        ([{"w": torch.ones(2, dtype=torch.complex64)}], [1], "w: there is no mean of torch.complex64"),
    ],
)
def test_inputs_that_cannot_be_combined_are_refused(
    updates: list[dict[str, Tensor]], weights: list[float], message: str
) -> None:
    with pytest.raises(AggregationError, match=message):
        weighted_mean(updates, weights)
    assert issubclass(AggregationError, ValueError)
