"""The mathematics of the federated probe: the sums of any partition into sites give the central solution."""

import math

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from fedssl.errors import ArtifactError, DataError, NotFinite
from fedssl.evaluation import require_sums, ridge_path, ridge_solution, ridge_sums

NUM, WIDTH, CLASSES = 3000, 48, 10
RNG = np.random.default_rng(0)
# Like representations: float32, not negative, correlated, and with a mean far from 0.
H = torch.from_numpy(np.maximum(RNG.normal(size=(NUM, 12)) @ RNG.normal(size=(12, WIDTH)) + 2, 0).astype(np.float32))
LABELS = torch.from_numpy((H.numpy() @ RNG.normal(size=(WIDTH, CLASSES))).argmax(axis=1))


def central(h: NDArray[np.float64], y: NDArray[np.float64], ridge: float) -> NDArray[np.float64]:
    """Return the least-squares solution with one row of sqrt(ridge) per feature, but none for the column of ones."""
    x = np.concatenate([h, np.ones((len(h), 1))], axis=1)
    rows = np.concatenate([math.sqrt(ridge) * np.eye(h.shape[1]), np.zeros((h.shape[1], 1))], axis=1)
    stacked = np.concatenate([y, np.zeros((h.shape[1], y.shape[1]))])
    found: NDArray[np.float64] = np.linalg.lstsq(np.concatenate([x, rows]), stacked, rcond=None)[0]
    return found


def dirichlet_sites(num_sites: int, alpha: float) -> list[NDArray[np.int64]]:
    """Return the indices of each site's images. Each class is divided among the sites by its own draw.

    The last site has images of only one class, and the one before it has none.
    """
    rng = np.random.default_rng(num_sites)
    sites: list[list[int]] = [[] for _ in range(num_sites + 2)]
    for label in range(CLASSES):
        members = rng.permutation(np.flatnonzero(LABELS.numpy() == label))
        if label == 3:
            members, sites[-1] = members[20:], members[:20].tolist()
        ends = np.cumsum(rng.dirichlet([alpha] * num_sites) * len(members)).astype(int)[:-1]
        for site, part in zip(sites, np.split(members, ends), strict=False):
            site += part.tolist()
    return [np.array(site, np.int64) for site in sites]


@pytest.mark.parametrize("num_sites", [2, 5, 20])
def test_sums_of_sites_give_the_central_solution(num_sites: int) -> None:
    sites = dirichlet_sites(num_sites, 0.1)
    assert sum(map(len, sites)) == NUM
    assert len(sites[-2]) == 0
    sums = [ridge_sums(H[site], LABELS[site], CLASSES) for site in sites]
    for (gram, moment), site in zip(sums, sites, strict=True):
        require_sums(gram, moment, num_images=len(site))
    gram, moment = (sum(part[1:], start=part[0]) for part in zip(*sums, strict=True))
    path = ridge_path(gram)
    assert len(path) == 10
    assert path == sorted(path)
    for ridge in path:
        expected = central(H.double().numpy(), np.eye(CLASSES)[LABELS], ridge)
        found = ridge_solution(gram, moment, ridge).numpy()
        assert np.abs(found - expected).max() <= 1e-8 * max(1, np.abs(expected).max())


def test_several_labels_per_image_give_the_central_solution() -> None:
    several = torch.from_numpy(RNG.integers(0, 2, (NUM, 4)).astype(bool))
    gram, moment = ridge_sums(H, several, 4)
    ridge = ridge_path(gram)[4]
    expected = central(H.double().numpy(), several.double().numpy(), ridge)
    assert np.abs(ridge_solution(gram, moment, ridge).numpy() - expected).max() <= 1e-8


def test_the_solution_matches_an_example_worked_by_hand() -> None:
    """h = 0, 2, 4 with classes 0, 1, 1: the means are 2 and 2/3, so w = sum((h - 2) y) / (sum((h - 2)^2) + ridge)."""
    gram, moment = ridge_sums(torch.tensor([[0.0], [2.0], [4.0]]), torch.tensor([0, 1, 1]), 2)
    assert gram.tolist() == [[20, 6], [6, 3]]
    assert moment.tolist() == [[0, 6], [1, 2]]
    weights = ridge_solution(gram, moment, 2.0)
    expected = torch.tensor([[-0.2, 0.2], [1 / 3 + 0.4, 2 / 3 - 0.4]], dtype=torch.float64)
    assert torch.allclose(weights, expected, rtol=0, atol=1e-15)


def test_the_intercept_is_not_penalised() -> None:
    gram, moment = ridge_sums(H, LABELS, CLASSES)
    weights = ridge_solution(gram, moment, 1e15)
    assert torch.allclose(weights[-1], moment[-1] / NUM, atol=1e-6)
    assert float(weights[:-1].abs().max()) < 1e-6
    shifted_gram, shifted_moment = ridge_sums(H + 8, LABELS, CLASSES)
    ridge = ridge_path(gram)[3]
    moved = ridge_solution(shifted_gram, shifted_moment, ridge)
    assert torch.allclose(moved[:-1], ridge_solution(gram, moment, ridge)[:-1], atol=1e-6)


def test_sums_are_float64_and_symmetric_and_do_not_depend_on_the_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    gram, moment = ridge_sums(H, LABELS, CLASSES)
    assert gram.dtype == moment.dtype == torch.float64
    assert torch.equal(gram, gram.T)
    assert float(gram[-1, -1]) == NUM
    assert moment[-1].tolist() == torch.bincount(LABELS, minlength=CLASSES).tolist()
    monkeypatch.setattr("fedssl.evaluation.ridge._CHUNK", 7)
    in_parts = ridge_sums(H, LABELS, CLASSES)
    assert torch.allclose(in_parts[0], gram, rtol=1e-13)
    assert torch.allclose(in_parts[1], moment, rtol=1e-13)


def test_the_sums_of_a_site_without_images_are_zero() -> None:
    gram, moment = ridge_sums(H[:0], LABELS[:0], CLASSES)
    assert not gram.any()
    assert not moment.any()
    require_sums(gram, moment, num_images=0)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_representations_that_are_not_finite_are_refused(value: float) -> None:
    h = H[:5].clone()
    h[2, 3] = value
    with pytest.raises(ValueError, match="finite"):
        ridge_sums(h, LABELS[:5], CLASSES)


@pytest.mark.parametrize(
    "labels",
    [
        torch.tensor([0, 1, 10]),
        torch.tensor([0, 1, -1]),
        torch.tensor([0, 1]),
        torch.tensor([0.0, 1.0, 2.0]),
        torch.zeros(3, 9),
        torch.full((3, 10), 2),
        torch.full((3, 10), math.nan),
    ],
)
def test_labels_that_do_not_fit_the_images_or_classes_are_refused(labels: torch.Tensor) -> None:
    with pytest.raises(DataError, match="labels"):
        ridge_sums(H[:3], labels, CLASSES)


def test_images_of_fewer_than_two_classes_are_refused() -> None:
    for count in (0, 50):
        gram, moment = ridge_sums(H[:count], torch.full((count,), 3), CLASSES)
        with pytest.raises(DataError, match="two classes"):
            ridge_solution(gram, moment, 1.0)


def changed(gram: torch.Tensor, row: int, column: int, value: float) -> torch.Tensor:
    gram = gram.clone()
    gram[row, column] = value
    return gram


def test_impossible_sums_are_refused() -> None:
    gram, moment = ridge_sums(H, LABELS, CLASSES)
    bad: list[tuple[torch.Tensor, torch.Tensor, type[Exception], str]] = [
        (changed(gram, 2, 3, math.nan), moment, NotFinite, "NaN"),
        (gram, changed(moment, 2, 3, -math.inf), NotFinite, "infinity"),
        (changed(gram, 2, 3, 1 + float(gram[2, 3])), moment, ArtifactError, "symmetric"),
        (gram[:-1], moment, ArtifactError, "shapes"),
        (gram, moment[:-1], ArtifactError, "shapes"),
        (gram.float(), moment, ArtifactError, "float64"),
        (gram, changed(moment, WIDTH, 0, -1), ArtifactError, "fewer than 0"),
        (gram, changed(moment, WIDTH, 0, NUM + 1), ArtifactError, "more than all"),
    ]
    for wrong_gram, wrong_moment, error, words in bad:
        for act in (lambda g, m: require_sums(g, m), lambda g, m: ridge_solution(g, m, 1.0)):
            with pytest.raises(error, match=words):
                act(wrong_gram, wrong_moment)
    with pytest.raises(ArtifactError, match="claim 3,000 images, but there are only 2,999"):
        require_sums(gram, moment, num_images=NUM - 1)
    require_sums(gram, moment, num_images=NUM)


def test_invalid_penalties_and_singular_sums_are_refused() -> None:
    gram, moment = ridge_sums(H, LABELS, CLASSES)
    for ridge in (-1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match="not negative"):
            ridge_solution(gram, moment, ridge)
    few = torch.tensor([0, 1])
    gram, moment = ridge_sums(torch.tensor([[1.0, 1, 0], [2, 2, 0]]), few, 2)
    with pytest.raises(ArtifactError, match="larger ridge"):
        ridge_solution(gram, moment, 0.0)
    assert ridge_solution(gram, moment, 1e-3).isfinite().all()
