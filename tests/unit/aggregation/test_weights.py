"""Weights with a bound on the share of each: hand calculations, invariances, and inputs without a solution."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedssl.aggregation import AggregationError, capped_at_median, capped_weights


@pytest.mark.parametrize(
    ("weights", "max_share", "expected"),
    [
        # R = 20, T = 20 / (1 - 0.5) = 40: 100 becomes 0.5 * 40 = 20.
        ([100, 10, 10], 0.5, [20, 10, 10]),
        # Capping one is not enough: 90 would be 0.3 * 100 / 0.7 > 0.3. R = 10, T = 10 / (1 - 0.6) = 25, both become
        # 7.5.
        ([90, 5, 5, 1e12], 0.3, [7.5, 5, 5, 7.5]),
        # R = 3, T = 3 / 0.4 = 7.5: 8 and 4 become 2.25, and 2 stays below it.
        ([8, 4, 2, 1], 0.3, [2.25, 2.25, 2, 1]),
        ([1, 2, 3], 0.5, [1, 2, 3]),  # exactly at the bound
        ([1e12, 100, 100, 100], 0.25, [1, 1, 1, 1]),  # 4 shares of a quarter
        ([100, 10], 0.25, [1, 1]),  # 2 * 0.25 < 1: equal shares are the smallest largest ones
        ([7], 0.1, [1]),
        ([5, 4, 1], 1.0, [5, 4, 1]),
    ],
)
def test_capped_weights_match_hand_calculations(weights: list[float], max_share: float, expected: list[float]) -> None:
    assert capped_weights(weights, max_share) == pytest.approx(expected, rel=1e-12)


@given(
    weights=st.lists(st.integers(1, 10**12), min_size=1, max_size=30),
    max_share=st.floats(0.01, 1),
    seed=st.randoms(use_true_random=False),
)
def test_no_share_exceeds_the_bound_and_no_weight_grows(weights: list[int], max_share: float, seed: object) -> None:
    found = capped_weights(weights, max_share)
    total = sum(found)
    assert max(found) / total <= max(max_share, 1 / len(weights)) * (1 + 1e-9)
    if len(weights) * max_share > 1 and found != [1.0] * len(weights):
        assert all(new <= old for new, old in zip(found, weights, strict=True))
        kept = [(old, new) for old, new in zip(weights, found, strict=True) if new < max(found)]
        assert all(new == old for old, new in kept)  # so the others keep their proportions
    order = list(range(len(weights)))
    seed.shuffle(order)  # type: ignore[attr-defined]
    assert capped_weights([weights[i] for i in order], max_share) == [found[i] for i in order]


@pytest.mark.parametrize(("weights", "share"), [([], 0.0), ([1], 1.5), ([0, 1], 0.5), ([float("inf")], 0.5)])
def test_invalid_weights_and_shares_are_refused(weights: list[float], share: float) -> None:
    with pytest.raises(AggregationError):
        capped_weights(weights, share)


def test_weights_capped_at_a_ratio_of_their_median_match_hand_calculations() -> None:
    assert capped_at_median([1, 2, 3, 90], 1.3) == [1, 2, 3, 3]  # 1.3 * 2.5 = 3.25
    assert capped_at_median([7, 9], 1.0) == [7, 8]
    for ratio in (0.99, float("nan"), float("inf")):
        with pytest.raises(AggregationError, match="at least 1"):
            capped_at_median([1, 2], ratio)
