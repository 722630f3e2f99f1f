"""Thresholds: the numbers of the design, what a choice guarantees, and which choices are refused."""

import itertools

import pytest

from fedssl.secure_aggregation.thresholds import (
    Thresholds,
    choose_thresholds,
    log2_abort,
    log2_parted,
    log2_split_view,
    require_private,
    share_threshold,
)


def test_a_coordinator_that_shows_two_lists_never_gets_both_secrets() -> None:
    # Each honest holder gives one share and each colluding one gives both; the threshold is the smallest that suffices.
    for holders in range(3, 60):
        for collusion in range(holders - 1):
            threshold = share_threshold(holders, collusion)
            most = holders - collusion + 2 * collusion
            assert 2 * threshold > most >= 2 * (threshold - 1)
            assert threshold <= holders


def test_the_thresholds_are_those_of_the_design() -> None:
    assert [share_threshold(n, n // 4) for n in (5, 10, 20, 100)] == [4, 7, 13, 63]


@pytest.mark.parametrize(
    ("degree", "threshold", "corrupt", "expected"),
    [(128, 90, 100, (-66, -32)), (134, 100, 200, (-41, -20))],
)
def test_the_bounds_are_those_of_the_design(
    degree: int, threshold: int, corrupt: int, expected: tuple[int, int]
) -> None:
    found = (
        log2_split_view(1000, degree, threshold, corrupt),
        log2_abort(1000, degree, threshold, 100),
    )
    assert found == pytest.approx(expected, abs=0.6)


def test_the_split_view_probability_of_a_small_graph_matches_enumeration() -> None:
    # Seven clients, degree 4 and 3 colluding: count the 4-subsets of the 6 others with at least 2 t - n colluding
    # clients.
    subsets = list(itertools.combinations(range(6), 4))
    many = [subset for subset in subsets if len([x for x in subset if x < 3]) >= 2 * 4 - 5]
    assert 2 ** log2_split_view(7, 4, 4, 3) == pytest.approx(7 * len(many) / len(subsets))


def test_the_probability_of_a_parted_ring_matches_enumeration() -> None:
    # Eleven clients, degree 6, threshold 5, 4 colluding: of the next 3 on the ring at least 5 - 3 - 1 = 1 colludes.
    subsets = list(itertools.combinations(range(10), 3))
    bad = [subset for subset in subsets if any(x < 4 for x in subset)]
    assert 2 ** log2_parted(11, 6, 5, 4) == pytest.approx(11 * len(bad) / len(subsets))


def test_the_designs_degree_is_too_small_if_the_coordinator_chooses_the_lost_clients() -> None:
    assert log2_parted(1000, 128, 90, 100) == pytest.approx(-23.3, abs=0.1)
    with pytest.raises(ValueError, match="do not resist 100 colluding"):
        require_private(Thresholds(degree=128, threshold=90, collusion=100, min_survivors=102), 1000)


@pytest.mark.parametrize("num_clients", [129, 200, 1000])
def test_a_sparse_graph_is_within_its_bounds_and_may_lose_a_tenth(num_clients: int) -> None:
    limits = choose_thresholds(num_clients)
    assert limits.degree < num_clients - 1
    assert log2_abort(num_clients, limits.degree, limits.threshold, num_clients // 10) <= -20
    for remaining in (num_clients, num_clients - num_clients // 10):
        require_private(limits, remaining)


@pytest.mark.parametrize("num_clients", [3, 4, 5, 40, 128])
def test_a_small_cohort_has_a_complete_graph(num_clients: int) -> None:
    limits = choose_thresholds(num_clients)
    assert limits.degree == num_clients - 1
    assert 2 * limits.threshold > num_clients + limits.collusion
    for remaining in range(max(limits.threshold, limits.min_survivors), num_clients + 1):
        require_private(limits, remaining)


def test_invalid_choices_are_refused() -> None:
    with pytest.raises(ValueError, match="at least 3 clients, not 2"):
        choose_thresholds(2)
    with pytest.raises(ValueError, match=r"min_cohort must be between 3 and the cohort's 5 clients, not 6"):
        choose_thresholds(5, min_cohort=6)
    with pytest.raises(ValueError, match="must be between 3 and the cohort's 5 clients"):
        choose_thresholds(5, min_cohort=2)
    with pytest.raises(ValueError, match="leave fewer than 2 of 5"):
        choose_thresholds(5, collusion=4)
    with pytest.raises(ValueError, match="0 to 3 can collude, not 4"):
        share_threshold(5, 4)


def test_limits_that_are_not_private_are_refused() -> None:
    with pytest.raises(ValueError, match="does not resist 2"):
        require_private(Thresholds(degree=9, threshold=6, collusion=2, min_survivors=4), 10)
    with pytest.raises(ValueError, match="is too small for collusion = 2"):
        require_private(Thresholds(degree=9, threshold=7, collusion=2, min_survivors=3), 10)
    with pytest.raises(ValueError, match="fewer than a threshold"):
        require_private(Thresholds(degree=9, threshold=7, collusion=2, min_survivors=4), 6)
    with pytest.raises(ValueError, match="do not resist 100 colluding"):
        require_private(Thresholds(degree=20, threshold=15, collusion=100, min_survivors=102), 1000)
