"""Seeds and cohorts. Their constants must not change between versions, or every run would train other weights."""

import random
import subprocess
import sys
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedssl.protocol.training import CohortConfig
from fedssl.seeding import derive_seed, sample_cohort

NAMES = [f"client-{i}" for i in range(10)]


@pytest.mark.parametrize(
    ("parts", "seed"),
    [
        ((0, 0, "", "model"), 2787977121496131904),
        ((0, 1, "a", "views/0"), 80307219802593107),
        ((7, 3, "hospital-b", "batches/1"), 5175591430559230862),
        ((2**63 - 1, 100_000, "z" * 63, "x"), 7259433206142165190),
    ],
)
def test_seeds_equal_the_golden_ones(parts: tuple[int, int, str, str], seed: int) -> None:
    assert derive_seed(*parts) == seed


@pytest.mark.parametrize(
    ("seed", "round_number", "cohort"),
    [
        (0, 1, ["client-3", "client-4", "client-9"]),
        (0, 2, ["client-0", "client-5", "client-7"]),
        (1, 1, ["client-1", "client-3", "client-7"]),
    ],
)
def test_cohorts_equal_the_golden_ones(seed: int, round_number: int, cohort: list[str]) -> None:
    assert sample_cohort(NAMES, CohortConfig(fraction=0.3), seed, round_number) == cohort


parts = st.tuples(
    st.integers(0, 2**63 - 1), st.integers(0, 10**5), st.text("abc-", max_size=5), st.text("xy/0", max_size=5)
)


@given(parts, parts)
def test_each_part_changes_the_seed(one: tuple[int, int, str, str], two: tuple[int, int, str, str]) -> None:
    assert 0 <= derive_seed(*one) < 2**63
    assert (derive_seed(*one) == derive_seed(*two)) == (one == two)


@pytest.mark.parametrize(
    ("fraction", "num_clients", "chosen"),
    [
        (1.0, 7, 7),
        (0.5, 2, 1),
        (0.5, 3, 2),  # 1.5, rounded up
        (0.5, 5, 3),
        (0.3, 5, 2),  # 1.5, and in binary a little less than 0.3
        (0.29, 50, 15),  # 14.5, and in binary a little less
        (0.1, 5, 1),
        (0.1, 4, 1),  # 0.4, but at least one
        (0.001, 10, 1),
        (1e-9, 10, 1),
        (0.999, 10, 10),
        (0.34, 3, 1),
    ],
)
def test_the_cohort_size_is_rounded_half_up_and_at_least_one(fraction: float, num_clients: int, chosen: int) -> None:
    names = [f"c{i}" for i in range(num_clients)]
    assert len(sample_cohort(names, CohortConfig(fraction=fraction), 0, 1)) == chosen


@given(
    st.sets(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=20),
    st.floats(0.01, 1),
    st.integers(0, 9),
    st.integers(1, 9),
    st.randoms(use_true_random=False),
)
def test_a_cohort_does_not_depend_on_the_order_of_the_clients(
    names: set[str], fraction: float, seed: int, round_number: int, rng: random.Random
) -> None:
    cohort = CohortConfig(fraction=fraction)
    drawn = sample_cohort(sorted(names), cohort, seed, round_number)
    shuffled = [*names, *names]
    rng.shuffle(shuffled)
    assert sample_cohort(shuffled, cohort, seed, round_number) == drawn == sorted(set(drawn))
    assert 1 <= len(drawn) <= len(names)
    assert names >= set(drawn)


def test_all_clients_are_sampled_equally_often() -> None:
    drawn: Counter[str] = Counter()
    for round_number in range(1, 2001):
        drawn.update(sample_cohort(NAMES, CohortConfig(fraction=0.3), 5, round_number))
    assert sum(drawn.values()) == 6000
    assert all(abs(count - 600) < 100 for count in drawn.values())  # four standard deviations are 82


def test_without_clients_the_cohort_is_empty() -> None:
    assert sample_cohort([], CohortConfig(), 0, 1) == []


def test_every_process_derives_the_same_seeds_and_cohorts() -> None:
    """The interpreter's hash seed has no influence."""
    code = (
        "from fedssl.seeding import *; from fedssl.protocol.training import CohortConfig; "
        "print(derive_seed(7, 3, 'hospital-b', 'batches/1'), "
        f"sample_cohort({NAMES!r}, CohortConfig(fraction=0.3), 0, 1))"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", code], env={"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True
        ).stdout
        for seed in ("1", "2")
    }
    assert outputs == {"5175591430559230862 ['client-3', 'client-4', 'client-9']\n"}
