"""Robust aggregation: hand calculations, float64 references, and properties that hold for any cohort."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fedssl.aggregation import (
    AggregationError,
    coordinate_median,
    geometric_median,
    multi_krum,
    trimmed_mean,
    weighted_mean,
)

Update = dict[str, Tensor]
Rule = Callable[[list[Update]], Update]

RULES: dict[str, Rule] = {
    "median": coordinate_median,
    "trimmed": lambda updates: trimmed_mean(updates, 1),
    "krum": lambda updates: multi_krum(updates, 1, len(updates) - 1),
    "geometric": lambda updates: geometric_median(updates, [1.0] * len(updates), 64, 1e-6),
}


def _scalars(*values: float) -> list[Update]:
    return [{"w": torch.tensor([value])} for value in values]


def _drawn(count: int, seed: int = 0) -> list[Update]:
    """Return random updates. Each has two floating-point tensors and a counter."""
    generator = torch.Generator().manual_seed(seed)
    return [
        {
            "a": torch.randn(5, 3, generator=generator),
            "b": torch.randn(7, generator=generator).double(),
            "steps": torch.randint(0, 100, (), generator=generator),
        }
        for _ in range(count)
    ]


def _flat(update: Update) -> np.ndarray[Any, Any]:
    """Return the floating-point values of an update as one float64 vector."""
    return np.concatenate([update[name].double().numpy().ravel() for name in ("a", "b")])


def _close(found: Update, expected: np.ndarray[Any, Any]) -> None:
    np.testing.assert_allclose(found["a"].double().numpy().ravel(), expected[:15], rtol=1e-6, atol=1e-7)
    np.testing.assert_allclose(found["b"].numpy(), expected[15:], rtol=1e-12, atol=1e-12)


def test_the_median_of_odd_and_even_counts_matches_hand_calculations() -> None:
    assert coordinate_median(_scalars(3.0, -1e30, 2.0))["w"].item() == 2.0
    assert coordinate_median(_scalars(3.0, 1e30, 2.0, 6.0))["w"].item() == 4.5
    assert coordinate_median([{"n": torch.tensor(4)}, {"n": torch.tensor(5)}])["n"].item() == 4  # half to even
    assert coordinate_median([{"n": torch.tensor(5)}, {"n": torch.tensor(6)}])["n"].item() == 6


def test_trimmed_mean_matches_hand_calculations() -> None:
    assert trimmed_mean(_scalars(1.0, 2.0, 6.0, 1e30, -1e30), 1)["w"].item() == 3.0
    assert trimmed_mean(_scalars(1.0, 2.0, 6.0, 1e30, -1e30), 2)["w"].item() == 2.0
    assert trimmed_mean([{"n": torch.tensor(value)} for value in (1, 2, 3, 100)], 1)["n"].item() == 2
    assert trimmed_mean([{"n": torch.tensor(value)} for value in (0, 1, 1, 2, 9)], 1)["n"].item() == 1  # 4/3 rounded
    assert trimmed_mean([{"n": torch.tensor(value)} for value in (0, 1, 2, 2, 9)], 1)["n"].item() == 2  # 5/3 rounded


def test_krum_scores_match_hand_calculations() -> None:
    """With f = 1 only the nearest neighbour counts: 0, 1, 3, 10 score 1, 1, 4, 49. The first of two equals wins."""
    values = _scalars(0.0, 1.0, 3.0, 10.0)
    assert multi_krum(values, 1, 1)["w"].item() == 0.0
    assert multi_krum(values, 1, 2)["w"].item() == 0.5
    assert multi_krum(values, 1, 3)["w"].item() == pytest.approx(4 / 3)
    # With f = 0 the two nearest count: 0, 1, 3 score 1 + 9, 1 + 4, 4 + 9.
    assert multi_krum(values, 0, 1)["w"].item() == 1.0


def test_one_weiszfeld_step_matches_a_hand_calculation() -> None:
    """The mean of 0, 0, 3 is 1, at distances 1, 1, 2. The shares are 1, 1, 1/2, so the next point is 1.5 / 2.5."""
    assert geometric_median(_scalars(0.0, 0.0, 3.0), [1, 1, 1], 1, 1e-6)["w"].item() == pytest.approx(0.6)
    assert geometric_median(_scalars(0.0, 3.0), [2, 1], 0, 1e-6)["w"].item() == 1.0


@pytest.mark.parametrize("count", [5, 6])
def test_median_and_trimmed_mean_agree_with_numpy(count: int) -> None:
    updates = _drawn(count)
    stacked = np.stack([_flat(update) for update in updates])
    _close(coordinate_median(updates), np.median(stacked, axis=0))
    for num_trimmed in (0, 1, 2):
        kept = np.sort(stacked, axis=0)[num_trimmed : count - num_trimmed]
        _close(trimmed_mean(updates, num_trimmed), kept.mean(axis=0))
    steps = [int(update["steps"]) for update in updates]
    assert int(coordinate_median(updates)["steps"]) == round(float(np.median(steps)))


def test_krum_agrees_with_its_definition() -> None:
    updates = _drawn(7, seed=3)
    points = [_flat(update) for update in updates]
    scores = [
        sum(sorted(float(np.sum((a - b) ** 2)) for j, b in enumerate(points) if j != i)[: 7 - 2 - 2])
        for i, a in enumerate(points)
    ]
    chosen = sorted(range(7), key=scores.__getitem__)[:3]
    _close(multi_krum(updates, 2, 3), np.mean([points[i] for i in chosen], axis=0))


def test_geometric_median_agrees_with_an_independent_iteration() -> None:
    updates, weights, smoothing = _drawn(5, seed=4), np.array([3.0, 1.0, 2.0, 5.0, 1.0]), 1e-3
    points = np.stack([_flat(update) for update in updates])
    center = weights @ points / weights.sum()
    for _ in range(6):
        shares = weights / np.maximum(smoothing, np.linalg.norm(points - center, axis=1))
        center = shares @ points / shares.sum()
    _close(geometric_median(updates, weights.tolist(), 6, smoothing), center)


def test_geometric_median_minimises_the_sum_of_distances() -> None:
    updates = _drawn(5, seed=5)
    points = np.stack([_flat(update) for update in updates])
    found = _flat(geometric_median(updates, [1] * 5, 200, 1e-9))
    towards = (points - found) / np.linalg.norm(points - found, axis=1, keepdims=True)
    assert np.linalg.norm(towards.sum(axis=0)) < 1e-4


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_the_order_of_updates_changes_no_bit_of_the_median_and_the_trimmed_mean(rule: Rule) -> None:
    updates = _drawn(6, seed=1)
    one, other = rule(updates), rule(updates[::-1])
    for name, tensor in one.items():
        torch.testing.assert_close(tensor, other[name], rtol=1e-6, atol=1e-7)
        if rule in (RULES["median"], RULES["trimmed"]):
            assert torch.equal(tensor, other[name])


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_equal_updates_are_returned_unchanged(rule: Rule, dtype: torch.dtype) -> None:
    tensor = torch.randn(300_000, generator=torch.Generator().manual_seed(0)).to(dtype)
    updates = [{"w": tensor.clone(), "n": torch.tensor(2**53 + 1)} for _ in range(5)]
    found = rule(updates)
    assert list(found) == ["n", "w"]
    assert torch.equal(found["w"], tensor)
    assert found["w"].dtype == dtype
    assert int(found["n"]) == 2**53 + 1


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@pytest.mark.parametrize("attack", [-1.0, 1e6, 0.0, 3e38])
def test_one_dishonest_update_does_not_move_the_result_far(rule: Rule, attack: float) -> None:
    """A robust result stays within the spread of the honest updates. A mean under a large attack does not."""
    generator = torch.Generator().manual_seed(2)
    honest = [{"w": 1 + 0.1 * torch.randn(50, generator=generator)} for _ in range(6)]
    updates = [*honest, {"w": torch.full((50,), attack)}]
    center = weighted_mean(honest, [1] * 6)["w"]
    farthest = max(float((update["w"] - center).norm()) for update in honest)
    assert float((rule(updates)["w"] - center).norm()) < farthest
    if abs(attack) > 1e3:
        assert float((weighted_mean(updates, [1] * 7)["w"].double() - center).norm()) > 1000 * farthest


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_invalid_updates_are_refused(rule: Rule) -> None:
    with pytest.raises(AggregationError, match="there are no updates"):
        rule([])
    for wrong, message in [
        ({"w": torch.tensor([float("nan")])}, "update 3 has numbers in w that are not finite"),
        ({"w": torch.tensor([float("inf")])}, "not finite"),
        ({"w": torch.tensor([1.0, 2.0])}, "update 3 has w as"),
        ({"v": torch.tensor([1.0])}, "update 3 has other names"),
        ({"w": torch.tensor([1])}, "update 3 has w as"),
    ]:
        with pytest.raises(AggregationError, match=message):
            rule([*_scalars(1.0, 2.0, 3.0), wrong])
    with pytest.raises(AggregationError, match="there is no mean of"):
        rule([{"w": torch.tensor([True])}] * 4)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda updates: trimmed_mean(updates, 2), "2 values cannot be removed at both ends of 4"),
        (lambda updates: trimmed_mean(updates, -1), "cannot be removed"),
        (lambda updates: multi_krum(updates, 2, 1), "needs at least 5 updates, not 4"),
        (lambda updates: multi_krum(updates, -1, 1), "dishonest"),
        (lambda updates: multi_krum(updates, 1, 0), "cannot select 0 of 4"),
        (lambda updates: multi_krum(updates, 1, 5), "cannot select 5 of 4"),
        (lambda updates: geometric_median(updates, [1, 1], 1, 1e-6), "4 updates for 2 weights"),
        (lambda updates: geometric_median(updates, [1, 1, 1, 0], 1, 1e-6), "weight 3 must be positive"),
        (lambda updates: geometric_median(updates, [1] * 4, -1, 1e-6), "num_iterations"),
        (lambda updates: geometric_median(updates, [1] * 4, 1, 0.0), "smoothing"),
    ],
)
def test_invalid_parameters_are_refused(call: Rule, message: str) -> None:
    with pytest.raises(AggregationError, match=message):
        call(_scalars(1.0, 2.0, 3.0, 4.0))
