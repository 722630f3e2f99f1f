"""FLESD's ensemble, compared with hand calculations and the matrix of all pairs."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from fedssl.aggregation import AggregationError, ensemble_similarity
from support.tensors import standard_normal


def clients(num_samples: int = 9, widths: tuple[int, ...] = (4, 2, 7)) -> list[Tensor]:
    return [standard_normal(num_samples, width, seed=k) for k, width in enumerate(widths)]


def test_the_ensemble_matches_a_hand_calculation() -> None:
    # For the first client the samples are orthogonal. For the second (of width 1) they are the same. So M = (e + e)/2
    # on the diagonal and (1 + e)/2 off it. Row 0: 2e to 1 + e, of 1 + 3e = 9.1548.
    representations = [torch.eye(2), torch.tensor([[1.0], [3.0]])]
    p = ensemble_similarity(representations, rows=[0, 1], anchors=[0, 1], temperature=1.0)
    assert p.dtype == torch.float32
    expected = torch.tensor([[0.5938454849, 0.4061545151], [0.4061545151, 0.5938454849]])
    torch.testing.assert_close(p, expected)


@pytest.mark.parametrize("temperature", [0.1, 1.0])
@pytest.mark.parametrize("shifted", [False, True], ids=["as printed", "shifted by the row maximum"])
def test_the_result_equals_the_full_matrix_with_and_without_shift(temperature: float, shifted: bool) -> None:  # noqa: FBT001
    matrices = []
    for representation in clients():
        units = representation.numpy() / np.linalg.norm(representation.numpy(), axis=1, keepdims=True)
        similarity = units @ units.T
        if shifted:
            similarity = similarity - similarity.max(axis=1, keepdims=True)
        matrices.append(np.exp(similarity / temperature))
    ensemble = np.mean(matrices, axis=0)
    rows, anchors = [2, 7, 2], [0, 1, 2, 5, 5, 8]
    chosen = ensemble[np.ix_(rows, anchors)]
    expected = chosen / chosen.sum(axis=1, keepdims=True)
    p = ensemble_similarity(clients(), rows, torch.tensor(anchors), temperature)
    assert p.numpy() == pytest.approx(expected, rel=1e-10)
    assert p.dtype == torch.float64


def test_rows_sum_to_one_and_each_sample_is_most_similar_to_itself() -> None:
    p = ensemble_similarity(clients(), range(9), range(9), 0.1)
    torch.testing.assert_close(p.sum(dim=1), torch.ones(9, dtype=torch.float64))
    assert p.argmax(dim=1).tolist() == list(range(9))


def test_lengths_rotations_and_the_order_of_clients_have_no_influence() -> None:
    representations = clients()
    p = ensemble_similarity(representations, [0, 4], range(9), 0.1)
    turn = torch.linalg.qr(standard_normal(4, 4, seed=9)).Q
    lengths = torch.linspace(0.1, 20, 9, dtype=torch.float64)[:, None]
    changed = [representations[2], representations[0] @ turn * lengths, representations[1]]
    torch.testing.assert_close(ensemble_similarity(changed, [0, 4], range(9), 0.1), p, rtol=1e-10, atol=0)


def test_a_temperature_so_low_that_every_exponential_underflows_is_handled() -> None:
    # Here exp((cos - 1)/0.002) is at most exp(-500): below float32's range and, for the parts of the mean, below
    # float64's.
    representations = [torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0]])]
    p = ensemble_similarity(representations, [0], [1, 2], 0.002)
    assert p.tolist() == [[1.0, 0.0]]
    same = ensemble_similarity([torch.eye(3)], [0], [1, 2], 1e-4)
    assert same.tolist() == [[0.5, 0.5]]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_computed_in_single_precision(dtype: torch.dtype) -> None:
    halves = [representation.to(dtype) for representation in clients()]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        p = ensemble_similarity(halves, [0, 1], range(9), 0.1)
    assert p.dtype == torch.float32
    exact = ensemble_similarity([half.double() for half in halves], [0, 1], range(9), 0.1)
    torch.testing.assert_close(p.double(), exact, rtol=1e-4, atol=1e-7)


def test_the_matrix_of_all_pairs_is_never_built() -> None:
    # 60,000 samples: the matrix of all pairs would take 14 GB.
    representation = standard_normal(60_000, 2, seed=0).float()
    p = ensemble_similarity([representation], torch.arange(4), torch.arange(100), 0.1)
    assert p.shape == (4, 100)


def test_the_result_has_no_gradient() -> None:
    representation = standard_normal(4, 3, seed=0).requires_grad_()
    assert not ensemble_similarity([representation], [0], [0, 1], 0.1).requires_grad


def test_invalid_inputs_are_refused() -> None:
    for representations, message in [
        ([], "no representations"),
        ([torch.ones(3)], "the same samples"),
        ([torch.ones(3, 2), torch.ones(4, 2)], "the same samples"),
    ]:
        with pytest.raises(AggregationError, match=message):
            ensemble_similarity(representations, [0], [0], 0.1)
    for temperature in (0.0, -1.0, math.nan):
        with pytest.raises(AggregationError, match="temperature must be positive"):
            ensemble_similarity([torch.eye(2)], [0], [0], temperature)
    for rows, anchors in [([0], []), ([[0]], [0])]:
        with pytest.raises(AggregationError, match="lists of indices"):
            ensemble_similarity([torch.eye(2)], torch.tensor(rows), torch.tensor(anchors), 0.1)
    with pytest.raises(IndexError):
        ensemble_similarity([torch.eye(2)], [2], [0], 0.1)
