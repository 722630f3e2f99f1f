"""Weighted kNN compared with a plain loop in float64."""

import math

import numpy as np
import pytest
import torch

from fedssl.evaluation import knn_accuracy
from fedssl.evaluation.neighbours import knn_scores


def _reference(train: np.ndarray, labels: np.ndarray, test: np.ndarray, truth: np.ndarray, k: int, t: float) -> float:
    right = 0
    for row, label in zip(test, truth, strict=True):
        cosines = [float(row @ other / np.linalg.norm(row) / np.linalg.norm(other)) for other in train]
        votes = np.zeros(max(labels.max(), truth.max()) + 1)
        for index in np.argsort(cosines)[::-1][:k]:
            votes[labels[index]] += math.exp(cosines[index] / t)
        right += int(votes.argmax() == label)
    return right / len(test)


def test_knn_accuracy_equals_that_of_a_plain_loop() -> None:
    rng = np.random.default_rng(0)
    train, test = rng.normal(size=(120, 6)) + 1, rng.normal(size=(70, 6)) + 1
    labels, truth = rng.integers(0, 3, 120), rng.integers(0, 3, 70)
    for k, temperature in ((1, 0.1), (5, 0.1), (50, 0.5), (500, 0.02)):
        expected = _reference(train, labels, test, truth, k, temperature)
        a, b, c, d = (torch.tensor(array) for array in (train, labels, test, truth))
        assert knn_accuracy(a, b, c, d, k=k, temperature=temperature) == expected


def test_chunks_and_the_scale_of_features_do_not_change_the_accuracy(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    train, test = torch.randn(300, 8, generator=generator), torch.randn(100, 8, generator=generator)
    labels, truth = torch.arange(300) % 5, torch.arange(100) % 5
    expected = knn_accuracy(train, labels, test, truth, k=20)
    monkeypatch.setattr("fedssl.evaluation.neighbours._CHUNK", 7)
    assert knn_accuracy(train, labels, test, truth, k=20) == expected
    assert knn_accuracy(10 * train, labels, 0.1 * test, truth, k=20) == expected


def test_neighbours_of_the_same_class_give_an_accuracy_of_one() -> None:
    features, labels = torch.eye(3).repeat(4, 1), torch.arange(3).repeat(4)
    assert knn_accuracy(features, labels, features, labels, k=4) == 1
    assert knn_accuracy(features, labels, features, (labels + 1) % 3, k=4) == 0


def test_neighbours_are_weighted_as_worked_out_by_hand() -> None:
    # One neighbour of class 0 weighs e^10, two of class 1 weigh 2 e^(10 cosine): 0.74 e^10 at 0.9, 1.21 e^10 at 0.95.
    def accuracy(cosine: float) -> float:
        side = math.sqrt(1 - cosine**2)
        train = torch.tensor([[1.0, 0, 0], [cosine, side, 0], [cosine, -side, 0], [0, 0, 1]])
        labels = torch.tensor([0, 1, 1, 2])
        return knn_accuracy(train, labels, torch.tensor([[2.0, 0, 0]]), torch.tensor([0]), k=3)

    assert accuracy(0.9) == 1
    assert accuracy(0.95) == 0


@pytest.mark.parametrize("temperature", [0.1, 1e-3, 1e-6])
def test_the_nearest_neighbour_decides_at_small_temperatures(temperature: float) -> None:
    """Its cosine of 0.768 weighs e^(-232) at 0.001, which is 0 in float32, as is the other's of 0.640."""
    train, test = torch.tensor([[1.0, 0.0], [0.0, 1.0]]), torch.tensor([[1.0, 1.2]])
    labels, truth = torch.tensor([0, 1]), torch.tensor([1])
    assert knn_accuracy(train, labels, test, truth, temperature=temperature) == 1
    (scores,) = knn_scores(train, torch.eye(2), test, temperature=temperature).tolist()
    second = 1 / (1 + math.exp((1 - 1.2) / math.sqrt(2.44) / temperature))
    assert scores == pytest.approx([1 - second, second], abs=1e-6)


def test_many_training_images_are_compared_in_smaller_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    train, test = torch.randn(300, 8, generator=generator), torch.randn(100, 8, generator=generator)
    labels, truth = torch.arange(300) % 5, torch.arange(100) % 5
    expected = knn_accuracy(train, labels, test, truth)
    monkeypatch.setattr("fedssl.evaluation.neighbours._MAX_COSINES", 1000)
    assert knn_accuracy(train, labels, test, truth) == expected
