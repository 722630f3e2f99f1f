"""The data card: suppression, drift and moments, with constants worked out by hand."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from fedssl.protocol.data_card import ChannelSums, drift, mean_histogram, moments_of, suppressed
from fedssl.protocol.policy import AllowRule


def test_small_counts_and_those_that_would_reveal_them_are_suppressed() -> None:
    assert suppressed([100, 0, 40], [100, 0, 40], 10) == [100, 0, 40]
    assert suppressed([100, 4, 40], [100, 4, 40], 10) == [100, None, None], "40 and the total would give 4"
    assert suppressed([100, 4, 7, 40], [100, 4, 7, 40], 10) == [100, None, None, 40]
    assert suppressed([100, 60], [100, 3], 10) == [None, None], "60 images of 3 patients"
    assert suppressed([4], [4], 10) == [None]


@given(st.lists(st.integers(0, 50), min_size=1, max_size=10), st.integers(1, 30))
def test_no_small_count_is_shown_and_a_hidden_count_is_never_the_only_one(counts: list[int], min_count: int) -> None:
    shown = suppressed(counts, counts, min_count)
    hidden = [count for count, each in zip(counts, shown, strict=True) if each is None]
    assert all(each is None or each == 0 or each >= min_count for each in shown)
    assert [each for each in shown if each is not None] == [
        count for count, each in zip(counts, shown, strict=True) if each is not None
    ]
    if hidden and any(shown[number] for number in range(len(counts))):
        assert len(hidden) > 1
        assert sum(hidden) >= min_count


def test_drift_is_the_total_variation_distance_over_the_shown_bins() -> None:
    mean = mean_histogram([(1.0, 0.0, 0.0), (0.0, 1.0, 0.0)])
    assert mean == (0.5, 0.5, 0.0)
    assert drift((1.0, 0.0, 0.0), mean) == 0.5
    assert drift((0.5, 0.5, 0.0), mean) == 0
    assert drift((None, None, None), mean) is None
    assert mean_histogram([]) is None
    assert mean_histogram([(0.8, None, None)]) == pytest.approx((0.8, 0.1, 0.1))


def test_moments_are_those_of_all_images() -> None:
    """The images have one pixel: 0 and 1 at one site, 0.5 at the other. Mean 0.5, variance (0.25 + 0.25 + 0) / 3."""
    found = moments_of(
        [
            ChannelSums(num_images=2, means=(1.0,), squares=(1.0,)),
            ChannelSums(num_images=1, means=(0.5,), squares=(0.25,)),
        ]
    )
    assert (found.channels, found.num_images, found.num_clients) == (1, 3, 2)
    assert found.mean == (0.5,)
    assert found.std[0] == pytest.approx(math.sqrt(0.5 / 3))


@pytest.mark.parametrize("sums", [{"means": (1.0,), "squares": (2.0,)}, {"means": (9.0,), "squares": (1.0,)},
                                  {"means": (1.0,), "squares": (0.5, 0.5)}])  # fmt: skip
def test_impossible_sums_are_refused(sums: dict[str, tuple[float, ...]]) -> None:
    with pytest.raises(ValidationError):
        ChannelSums(num_images=2, **sums)


@pytest.mark.parametrize(
    "more", [{"max_rounds": 3}, {"tensors": ("a",)}, {"methods": ("fedbyol",)}, {"secure": "required"}]
)
def test_a_rule_for_statistics_allows_only_a_minimum_count(more: dict[str, object]) -> None:
    for artifact in ("statistics", "channel-sums"):
        assert AllowRule.model_validate({"artifact": artifact, "methods": ("*",), "min_count": 5}).min_count == 5
        with pytest.raises(ValidationError, match="min_count, and no other keys"):
            AllowRule.model_validate({"artifact": artifact, "methods": ("*",), **more})
