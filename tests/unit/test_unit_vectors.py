"""Unit vectors compared with values worked out by hand, from the shortest to the longest rows, and what uses them."""

import math

import pytest
import torch
import torch.nn.functional as F

from fedssl.aggregation import balanced_kmeans, ensemble_similarity, spherical_kmeans
from fedssl.evaluation import knn_accuracy, uniformity
from fedssl.losses import negative_cosine
from fedssl.methods.add_ons.crossed_kl import Centers
from fedssl.methods.composition.ring import Ring
from fedssl.methods.objectives.dino import Prototypes
from fedssl.methods.objectives.orchestra import EmbeddingMemory
from fedssl.methods.reducers.similarity import pack
from fedssl.protocol.methods.add_ons import CrossedKLConfig
from fedssl.protocol.methods.distillation import Packing
from fedssl.unit_vectors import directions, unit


@pytest.mark.parametrize("scale", [1e-11, 1.0, 1e18])
def test_rows_of_every_ordinary_length_become_unit_vectors(scale: float) -> None:
    assert unit(scale * torch.tensor([[3.0, 4.0]]))[0].tolist() == pytest.approx([0.6, 0.8], rel=1e-6)


def test_a_row_that_is_shorter_than_the_limit_becomes_zero() -> None:
    assert unit(1e-13 * torch.tensor([[3.0, 4.0]]))[0].tolist() == [0, 0]


@pytest.mark.parametrize("scale", [1e19, 1e30])
def test_a_row_whose_length_overflows_makes_the_loss_nan_and_no_other_row(scale: float) -> None:
    """The squares of 3e19 and 4e19 exceed 3.4e38. Zeros in place of the row would give a finite loss."""
    rows = torch.tensor([[3 * scale, 4 * scale], [3.0, 4.0]])
    long, ordinary = unit(rows).tolist()
    assert all(map(math.isnan, long))
    assert ordinary == pytest.approx([0.6, 0.8])
    assert math.isnan(negative_cosine(rows, rows))
    assert float(negative_cosine(rows.double(), rows.double())) == pytest.approx(-1)  # float64 has room for it


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("scale", [1, 3e-10, 7e10])
def test_ordinary_rows_have_the_bits_of_normalize(scale: float, dtype: torch.dtype) -> None:
    h_NH = scale * torch.randn(300, 65, generator=torch.Generator().manual_seed(0), dtype=dtype)
    h_NH[0], h_NH[1] = 0, h_NH[1].relu()
    assert torch.equal(directions(h_NH), F.normalize(h_NH, dim=1))


@pytest.mark.parametrize("scale", [1e-43, 1e-36, 1e-20, 1e-13, 1e20, 1e37])
def test_very_short_and_very_long_rows_have_a_direction(scale: float) -> None:
    h_NH = torch.tensor([[3.0, 4.0], [-4.0, 3.0], [0.0, 0.0], [-2.0, 0.0]])
    expected = torch.tensor([[0.6, 0.8], [-0.8, 0.6], [0.0, 0.0], [-1.0, 0.0]])
    torch.testing.assert_close(directions(scale * h_NH), expected, rtol=0, atol=0.02 if scale < 1e-38 else 1e-6)


def test_rows_that_are_not_finite_are_treated_as_normalize_does() -> None:
    h_NH = torch.tensor([[torch.inf, 1.0], [torch.nan, 1.0]])
    torch.testing.assert_close(directions(h_NH), F.normalize(h_NH, dim=1), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("scale", [1e-30, 1e20])
def test_the_length_of_representations_does_not_change_measures(scale: float) -> None:
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(400) % 4
    h_NH = torch.randn(4, 16, generator=generator)[labels] + 0.3 * torch.randn(400, 16, generator=generator)
    measures = [
        (knn_accuracy(h[:300], labels[:300], h[300:], labels[300:], k=5), uniformity(h)) for h in (h_NH, scale * h_NH)
    ]
    assert measures[1] == pytest.approx(measures[0], rel=1e-5)
    assert measures[0][0] > 0.9


_ROWS = torch.randn(40, 6, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("scale", [1e-30, 1e20, 1e37])
def test_clusters_and_similarities_do_not_depend_on_the_length_of_embeddings(scale: float) -> None:
    """torch's normalize takes rows longer than 1.8e19, and shorter than 1e-12, for zeros."""
    for clustered in (spherical_kmeans, balanced_kmeans):
        one, other = (clustered(z, 4, generator=torch.Generator().manual_seed(0)) for z in (_ROWS, scale * _ROWS))
        assert torch.equal(one.assignments, other.assignments)
        torch.testing.assert_close(one.centroids, other.centroids)
    one, other = (ensemble_similarity([z], range(40), range(40), 0.1) for z in (_ROWS, scale * _ROWS))
    torch.testing.assert_close(one, other, rtol=1e-4, atol=0)


@pytest.mark.parametrize("packing", ["factored-f32", "representations-f32", "triangle-f16"])
@pytest.mark.parametrize("scale", [1e-30, 1e37])
def test_packed_similarities_do_not_depend_on_the_length_of_embeddings(packing: Packing, scale: float) -> None:
    torch.testing.assert_close(pack(scale * _ROWS, packing), pack(_ROWS, packing), rtol=0, atol=1e-6)


def test_an_embedding_whose_length_overflows_is_nan_wherever_networks_train() -> None:
    rows = torch.tensor([[3e30, 4e30], [3.0, 4.0]])
    ring, memory = Ring(torch.zeros(2, 2)), EmbeddingMemory(2, 2)
    ring.push(rows)
    memory.push(rows)
    centers = Centers(CrossedKLConfig(scale="unit", num_centers=2), 2)
    for found in (ring.keys, memory.embeddings, Prototypes(2, 3)(rows), centers.embed(rows)):
        assert found.isnan().all(dim=1).tolist() == [True, False]
    assert ring.keys[1].tolist() == pytest.approx([0.6, 0.8])
