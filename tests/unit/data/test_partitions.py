"""Partitions: the guarantees of each scheme and variant, on labels of realistic proportions."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from fedssl.data import (
    Variant,
    choose_images,
    describe_partition,
    effective_classes,
    keep_share,
    partition,
)
from fedssl.errors import DataError

LABELS = np.random.default_rng(0).permutation(np.repeat(np.arange(10), 200))
VARIANTS: Sequence[Variant] = ("fedx", "ssd", "flesd", "orchestra")


def _sizes(parts: Sequence[np.ndarray]) -> list[int]:
    return [len(part) for part in parts]


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 60), min_size=1, max_size=6).filter(lambda s: sum(s) >= 40),
    num_clients=st.integers(1, 4),
    scheme=st.sampled_from(["iid", "classes", "fedx", "ssd", "flesd", "orchestra"]),
    seed=st.integers(0, 2**63 - 1),
    alpha=st.sampled_from([0.3, 1.0, 100.0]),
)
def test_partitions_are_disjoint_sorted_and_complete(
    sizes: list[int], num_clients: int, scheme: str, seed: int, alpha: float
) -> None:
    assume(scheme != "fedx" or sum(sizes) >= 30 * num_clients)  # close to 10 per client, no draw gives all of them 10
    labels = np.repeat(np.arange(len(sizes)), sizes)
    if scheme in ("iid", "classes"):
        parts = partition(labels, num_clients, scheme, seed)  # type: ignore[arg-type]
    else:
        parts = partition(labels, num_clients, "dirichlet", seed, alpha, scheme)  # type: ignore[arg-type]
    assert len(parts) == num_clients
    assert all(part.dtype == np.int64 and bool((np.diff(part) > 0).all()) for part in parts)
    together = np.concatenate(parts)
    assert len(np.unique(together)) == len(together)
    if scheme != "flesd":
        assert np.array_equal(np.sort(together), np.arange(len(labels)))


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_partition_depends_only_on_the_seed(variant: Variant) -> None:
    np.random.seed(1)
    first = partition(LABELS, 5, "dirichlet", 3, 0.5, variant)
    np.random.seed(2)
    second = partition(LABELS, 5, "dirichlet", 3, 0.5, variant)
    assert all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))
    other = partition(LABELS, 5, "dirichlet", 4, 0.5, variant)
    assert any(not np.array_equal(a, b) for a, b in zip(first, other, strict=True))


def test_the_partition_equals_the_golden_one() -> None:
    """The results of runs depend on these numbers. They may change only with a changelog entry."""
    labels = np.repeat(np.arange(3), 20)
    parts = partition(labels, 3, "dirichlet", 17, 1.0)
    assert describe_partition(labels, parts).tolist() == [[1, 3, 8], [4, 12, 12], [15, 5, 0]]
    assert parts[0][:5].tolist() == [18, 29, 30, 38, 42]


def test_iid_sizes_differ_by_at_most_one() -> None:
    assert sorted(_sizes(partition(LABELS[:103], 10, "iid", 0))) == [10] * 7 + [11] * 3


def test_the_class_scheme_gives_five_clients_consecutive_pairs() -> None:
    table = describe_partition(LABELS, partition(LABELS, 5, "classes", 0))
    expected = np.zeros((5, 10), int)
    for client in range(5):
        expected[client, 2 * client : 2 * client + 2] = 200
    assert np.array_equal(table, expected)


def test_the_class_scheme_gives_each_client_twenty_consecutive_classes_of_cifar100() -> None:
    labels = np.random.default_rng(0).permutation(np.repeat(np.arange(100), 5))
    table = describe_partition(labels, partition(labels, 5, "classes", 0))
    for client in range(5):
        assert np.flatnonzero(table[client]).tolist() == list(range(20 * client, 20 * client + 20))
        assert table[client].max() == 5


def test_the_class_scheme_splits_classes_among_more_clients_than_classes() -> None:
    table = describe_partition(LABELS, partition(LABELS, 20, "classes", 0))
    assert (np.count_nonzero(table, axis=1) == 1).all()
    assert (table.sum(axis=1) == 100).all()


def test_fedx_gives_each_client_at_least_ten_images_and_applies_its_cap() -> None:
    for seed in range(10):
        table = describe_partition(LABELS, partition(LABELS, 10, "dirichlet", seed, 0.1))
        assert table.sum(axis=1).min() >= 10
        # A client with N/K images gets no more, so only its last class took it above the cap.
        for counts in table:
            last = np.flatnonzero(counts)[-1]
            assert counts[:last].sum() < 200


def test_ssd_may_leave_a_client_without_images() -> None:
    sizes = _sizes(partition(LABELS, 40, "dirichlet", 0, 0.01, "ssd"))
    assert min(sizes) == 0
    assert sum(sizes) == len(LABELS)


def test_ssd_sizes_vary_as_much_as_those_of_its_authors() -> None:
    """On CIFAR-10 with alpha 0.1, the authors have 2,920 to 7,520 images with 10 clients, and 60 to 4,039 with 50."""
    labels = np.repeat(np.arange(10), 5000)
    for num_clients, least, most in ((10, 2920, 7520), (50, 60, 4039)):
        sizes = np.array([_sizes(partition(labels, num_clients, "dirichlet", s, 0.1, "ssd")) for s in range(20)])
        assert sizes.min() < least
        assert sizes.max() > most
        assert (sizes.sum(axis=1) == 50_000).all()


def test_fedx_matches_its_rule_written_out() -> None:
    """Draw, exclude clients with N/K images, renormalise, cut at the running sum. Repeat until each client has 10."""
    class_sizes, num_clients, alpha = np.bincount(LABELS), 8, 0.2
    for seed in range(20):
        rng = np.random.default_rng([seed, 0])
        while True:
            counts = np.zeros((len(class_sizes), num_clients), int)
            for label, size in enumerate(class_sizes):
                p = rng.dirichlet([alpha] * num_clients)
                p = np.array([x if counts[:, k].sum() < len(LABELS) / num_clients else 0.0 for k, x in enumerate(p)])
                if p.sum() == 0:
                    break
                cuts = [int(x * size + 1e-6) for x in np.cumsum(p / p.sum())[:-1]]
                counts[label] = np.diff([0, *cuts, size])
            if counts.sum() == len(LABELS) and counts.sum(axis=0).min() >= 10:
                break
        table = describe_partition(LABELS, partition(LABELS, num_clients, "dirichlet", seed, alpha))
        assert np.array_equal(table, counts.T)


def test_flesd_matches_its_rule_written_out() -> None:
    """Draw for all classes until every client's sum over classes exceeds 0.5/K. Round the numbers down."""
    for seed in range(20):
        rng = np.random.default_rng([seed, 0])
        shares = rng.dirichlet([0.05] * 6, size=10)
        while shares.sum(axis=0).min() <= 0.5 / 6:
            shares = rng.dirichlet([0.05] * 6, size=10)
        table = describe_partition(LABELS, partition(LABELS, 6, "dirichlet", seed, 0.05, "flesd"))
        assert np.array_equal(table, np.floor(shares * 200).T)


def test_orchestra_keeps_the_ratios_of_the_draw() -> None:
    """Balancing only scales rows and columns, so the cross ratio of two clients and two classes does not change."""
    rng = np.random.default_rng([0, 0])
    drawn = rng.dirichlet([5.0] * 4, size=10)
    labels = np.repeat(np.arange(10), 50_000)
    table = describe_partition(labels, partition(labels, 4, "dirichlet", 0, 5.0, "orchestra")).T.astype(float)
    for a, b, k, j in ((0, 1, 0, 1), (3, 7, 2, 3), (9, 4, 1, 2)):
        expected = drawn[a, k] * drawn[b, j] / (drawn[a, j] * drawn[b, k])
        assert table[a, k] * table[b, j] / (table[a, j] * table[b, k]) == pytest.approx(expected, rel=0.02)


def test_flesd_rounds_down_and_keeps_a_minimum() -> None:
    parts = partition(LABELS, 6, "dirichlet", 0, 0.5, "flesd")
    assert len(LABELS) - 6 * 10 <= sum(_sizes(parts)) <= len(LABELS)
    assert min(_sizes(parts)) >= 0.5 / 6 * 200 - 10


@pytest.mark.parametrize("alpha", [0.01, 0.1, 10.0])
def test_orchestra_gives_equal_sizes(alpha: float) -> None:
    for num_clients in (7, 10, 100):
        sizes = _sizes(partition(LABELS, num_clients, "dirichlet", 0, alpha, "orchestra"))
        assert max(sizes) - min(sizes) <= 1
        assert sum(sizes) == len(LABELS)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_small_alpha_concentrates_the_classes(variant: Variant) -> None:
    def effective_classes(alpha: float) -> float:
        table = describe_partition(LABELS, partition(LABELS, 5, "dirichlet", 0, alpha, variant)).astype(float)
        shares = table / table.sum(axis=1, keepdims=True)
        entropy = -(shares * np.log(np.where(shares > 0, shares, 1))).sum(axis=1)
        return float(np.exp(entropy).mean())

    assert effective_classes(0.1) < 6 < 9 < effective_classes(100.0)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"num_clients": 0, "scheme": "iid"}, "num_clients"),
        ({"num_clients": 4000, "scheme": "iid"}, "fewer clients"),
        ({"num_clients": 5, "scheme": "dirichlet"}, "alpha"),
        ({"num_clients": 5, "scheme": "dirichlet", "alpha": float("nan")}, "alpha"),
        ({"num_clients": 500, "scheme": "dirichlet", "alpha": 0.5}, "too few"),
        ({"num_clients": 5, "scheme": "sorted"}, "sorted"),
        ({"num_clients": 5, "scheme": "dirichlet", "alpha": 1.0, "variant": "other"}, "other"),
    ],
)
def test_impossible_partitions_are_refused_with_what_to_change(arguments: dict[str, object], words: str) -> None:
    with pytest.raises(DataError, match=words):
        partition(LABELS, seed=0, **arguments)  # type: ignore[arg-type]


def test_redraws_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedssl.data.partitions._MAX_DRAWS", 50)
    for variant in ("fedx", "flesd"):
        with pytest.raises(DataError, match="larger alpha"):
            partition(LABELS, 100, "dirichlet", 0, 1e-3, variant)


def test_describe_partition_counts_classes_that_a_client_lacks() -> None:
    table = describe_partition(np.array([0, 0, 2]), [np.array([0, 1]), np.array([2]), np.array([], np.int64)])
    assert table.tolist() == [[2, 0, 0], [0, 0, 1], [0, 0, 0]]


def test_effective_classes_match_hand_calculations() -> None:
    table = np.array([[5, 0, 0, 0], [3, 3, 3, 3], [1, 1, 0, 0], [0, 0, 0, 0], [2, 1, 1, 0]])
    assert effective_classes(table).tolist() == pytest.approx([1, 4, 2, 0, 2**1.5])


def test_keep_share_rounds_half_up_and_keeps_at_least_one_image() -> None:
    parts = [np.arange(0, 100), np.arange(100, 105), np.arange(105, 106), np.array([], np.int64)]
    kept = keep_share(parts, 0.1, 0)
    assert _sizes(kept) == [10, 1, 1, 0], "half up, and at least one where there is any"
    assert all(np.isin(less, part).all() for less, part in zip(kept, parts, strict=True))
    assert _sizes(keep_share(parts, 0.29, 0))[0] == 29
    assert _sizes(keep_share([np.arange(50)], 0.29, 0)) == [15], "14.5 rounded half up, as it was written"
    assert all(a is b for a, b in zip(keep_share(parts, 1.0, 0), parts, strict=True))
    assert not np.array_equal(kept[0], keep_share(parts, 0.1, 1)[0])
    for share in (0.0, 1.1, float("nan")):
        with pytest.raises(DataError, match="share"):
            keep_share(parts, share, 0)


def test_a_clients_share_does_not_depend_on_the_other_clients() -> None:
    alone, among = keep_share([np.arange(30)], 0.5, 0), keep_share([np.arange(30), np.arange(30, 99)], 0.5, 0)
    assert np.array_equal(alone[0], among[0])


def test_choose_images_returns_a_sorted_random_subset() -> None:
    assert choose_images(5, None, 0).tolist() == [0, 1, 2, 3, 4]
    assert choose_images(5, 9, 0).tolist() == [0, 1, 2, 3, 4]
    chosen = choose_images(1000, 100, 1)
    assert len(np.unique(chosen)) == 100
    assert bool((np.diff(chosen) > 0).all())
    assert np.array_equal(chosen, choose_images(1000, 100, 1))
    assert not np.array_equal(chosen, choose_images(1000, 100, 2))
