"""Neighbours, near-duplicates and outliers, compared with the cosines of all pairs."""

import numpy as np
import pytest
import torch

from fedssl.embeddings import similarity
from fedssl.embeddings.similarity import Group, find_duplicates, find_nearest, find_outliers
from fedssl.errors import DataError

RNG = np.random.default_rng(0)
H = RNG.normal(size=(60, 5)).astype(np.float32)


def cosines(h: np.ndarray) -> np.ndarray:
    unit = h.astype(np.float64) / np.linalg.norm(h.astype(np.float64), axis=1, keepdims=True)
    return unit @ unit.T


@pytest.fixture(params=[7, 1 << 25])
def small_blocks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(similarity, "_MAX_COSINES", 60 * request.param)


def test_the_nearest_images_have_the_largest_cosines_in_order() -> None:
    found = find_nearest(H, torch.from_numpy(H[3]), 10)
    expected = cosines(H)[3]
    assert [each.position for each in found] == np.argsort(-expected)[:10].tolist()
    assert [each.cosine for each in found] == pytest.approx(expected[[each.position for each in found]], abs=1e-6)
    assert len(find_nearest(H, torch.from_numpy(H[3]), 100)) == 60


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("max_pairs", [3, 500])
def test_duplicates_are_the_most_similar_pairs_joined_into_groups(max_pairs: int) -> None:
    threshold = 0.9
    expected = cosines(H)
    pairs = sorted((expected[i, j], i, j) for i in range(60) for j in range(i) if expected[i, j] >= threshold)[::-1]
    groups: list[set[int]] = []
    for _, i, j in pairs[:max_pairs]:
        touched = [group for group in groups if {i, j} & group]
        groups = [group for group in groups if group not in touched] + [{i, j}.union(*touched)]
    found = find_duplicates(H, threshold, max_pairs)
    assert found.num_pairs == len(pairs) > 3
    assert sorted(sorted(group.positions) for group in found.groups) == sorted(map(sorted, groups))
    assert all(group.cosine >= threshold for group in found.groups)


@pytest.mark.usefixtures("small_blocks")
def test_copies_are_one_group_and_the_most_similar_group_comes_first() -> None:
    h = np.concatenate([H, H[[4, 4, 9]] * np.array([[1], [3], [1]], np.float32)])
    h[62, 0] += 0.02  # similar to 9, but not a copy of it
    found = find_duplicates(h, 0.9999, 100)
    assert [sorted(group.positions) for group in found.groups] == [[4, 60, 61], [9, 62]]
    assert found.groups[0].cosine == pytest.approx(1, abs=1e-6)
    assert found.num_pairs == 4


@pytest.mark.parametrize("width", [16, 2048])
def test_all_copies_have_a_cosine_of_1(width: int) -> None:
    h = np.random.default_rng(0).random((100, width), dtype=np.float32)
    found = find_duplicates(np.concatenate([h, h]), 1.0, 500)
    groups = sorted(sorted(group.positions) for group in found.groups)
    assert groups == [[number, number + 100] for number in range(100)]
    assert found.num_pairs == 100


def test_one_image_or_dissimilar_images_have_no_duplicates() -> None:
    assert find_duplicates(H[:1], 0.5, 10).groups == []
    assert find_duplicates(H, 1.1, 10).num_pairs == 0


def test_a_chain_is_one_group_with_its_smallest_cosine() -> None:
    angles = np.deg2rad([0, 10, 21, 90])
    h = np.stack([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)
    found = find_duplicates(h, 0.98, 10)
    assert found.groups == [Group([0, 1, 2], pytest.approx(np.cos(np.deg2rad(11))))]


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("k", [1, 10, 100])
def test_outliers_have_the_smallest_cosine_to_their_kth_neighbour(k: int) -> None:
    expected = cosines(H)
    np.fill_diagonal(expected, -np.inf)
    kth = -np.sort(-expected, axis=1)[:, min(k, 59) - 1]
    found = find_outliers(H, k, 12)
    assert [each.position for each in found] == np.argsort(kth, kind="stable")[:12].tolist()
    assert [each.cosine for each in found] == pytest.approx(np.sort(kth)[:12], abs=1e-6)


def test_outliers_of_a_single_image_are_refused() -> None:
    with pytest.raises(DataError, match="only one image"):
        find_outliers(H[:1], 1, 1)


def test_representations_of_zeros_are_similar_to_nothing() -> None:
    h = np.concatenate([H[:3], np.zeros((2, 5), np.float32)])
    assert find_duplicates(h, 0.999, 10).groups == []
    assert find_outliers(h, 1, 1)[0].cosine <= 0
