"""The share of the gap that a federation closes, and confidence intervals."""

import math

import pytest

from fedssl.experiments.gaps import gaps, interval
from fedssl.experiments.summary import Line


def line(name: str, **probes: float) -> Line:
    seeds = tuple(int(seed[1:]) for seed in probes)
    return Line(name, seeds, {"probe_last": tuple(probes.values())}, {})


def test_an_interval_uses_students_t() -> None:
    found = interval([1.0, 2.0, 3.0])  # deviation 1, and t = 4.302653 with 2 degrees of freedom

    assert found.mean == 2.0
    assert found.half_width == pytest.approx(4.302653 / math.sqrt(3), rel=1e-6)
    assert interval([0.5]).half_width is None


def test_shares_and_steps_compare_equal_seeds() -> None:
    first, second = gaps(
        [
            line("a", s0=0.50, s1=0.60, s2=0.70),
            line("b", s0=0.54, s1=0.62),
            line("local-only", s0=0.48, s1=0.56, s2=0.40),
            line("centralised", s0=0.58, s1=0.76),
        ]
    )

    assert first.accuracy.mean == pytest.approx(0.6)
    assert first.step is None
    assert first.share is not None
    assert first.share.mean == pytest.approx((0.2 + 0.2) / 2)
    assert second.step is not None
    assert second.step.mean == pytest.approx(0.03)
    assert second.share is not None
    assert second.share.mean == pytest.approx((0.6 + 0.3) / 2)


def test_there_is_no_share_without_both_bounds() -> None:
    (found,) = gaps([line("a", s0=0.5), line("local-only", s0=0.4)])

    assert found.share is None
    assert found.accuracy.mean == 0.5


@pytest.mark.parametrize("high", [0.48, 0.5, math.nan])
def test_there_is_no_share_if_one_seed_has_no_gap(high: float) -> None:
    """A method below both bounds would otherwise close more than the whole gap."""
    (found,) = gaps(
        [
            line("a", s0=0.4, s1=0.55),
            line("local-only", s0=0.5, s1=0.5),
            line("centralised", s0=high, s1=0.6),
        ]
    )

    assert found.share is None
    assert found.accuracy.mean == pytest.approx(0.475)


def test_an_encoder_that_diverged_makes_the_results_nan() -> None:
    (found,) = gaps(
        [
            line("a", s0=0.5, s1=math.nan, s2=0.7),
            line("local-only", s0=0.4, s1=0.5, s2=0.5),
            line("centralised", s0=0.6, s1=0.7, s2=0.8),
        ]
    )

    assert found.share is not None
    for each in (found.accuracy, found.share):
        assert math.isnan(each.mean)
        assert each.half_width is not None
        assert math.isnan(each.half_width)
