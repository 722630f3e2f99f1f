"""The factor that a client sends: it reproduces the similarities, and depends on nothing else."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedssl.methods.reducers.similarity_factor import similarity_factor
from support.tensors import standard_normal


def rotation(size: int, seed: int = 9) -> Tensor:
    return torch.linalg.qr(standard_normal(size, size, seed=seed)).Q


def cosines(z_ND: Tensor) -> np.ndarray:
    z = z_ND.double().numpy()
    unit = z / np.maximum(np.linalg.norm(z, axis=1, keepdims=True), 1e-300)
    return unit @ unit.T


def textbook(s: np.ndarray, width: int) -> np.ndarray:
    """Compute the pivoted Cholesky factor of the whole matrix, entry by entry, with the pivot rule of the module."""
    factor, left = np.zeros((len(s), width)), s.diagonal().copy()
    for k in range(min(width, len(s))):
        if left.max() <= 1e-10:
            break
        p = int(np.argmax(left >= (1 - 1e-4) * left.max()))
        factor[:, k] = (s[:, p] - factor[:, :k] @ factor[p, :k]) / np.sqrt(left[p])
        left -= factor[:, k] ** 2
    return factor


def some_with_twins(num: int = 24, width: int = 6) -> Tensor:
    """Return embeddings, a third of them repeated at other lengths, so that their pivots tie."""
    z_ND = standard_normal(num, width)
    z_ND[num // 3 : 2 * (num // 3)] = 3 * z_ND[: num // 3]
    return z_ND


HARD: dict[str, Tensor] = {
    "more images than numbers": standard_normal(40, 8),
    "fewer images than numbers": standard_normal(5, 8),
    "as many": standard_normal(8, 8),
    "one image": standard_normal(1, 4),
    "twins": some_with_twins(),
    "collapsed to a point": standard_normal(1, 6).expand(20, 6),
    "collapsed to a line": standard_normal(20, 1) @ standard_normal(1, 6),
    "of rank 3": standard_normal(30, 3) @ standard_normal(3, 8, seed=1),
    "nearly of rank 3": standard_normal(30, 3) @ standard_normal(3, 8, seed=1) + 1e-3 * standard_normal(30, 8, seed=2),
    "nearly collapsed": standard_normal(1, 8) + 1e-2 * standard_normal(40, 8, seed=1),
    "with a zero": torch.cat([standard_normal(4, 3), torch.zeros(1, 3, dtype=torch.float64)]),
    "all zero": torch.zeros(4, 3, dtype=torch.float64),
    "of odd lengths": standard_normal(20, 4) * torch.logspace(-6, 6, 20, dtype=torch.float64)[:, None],
}


def test_the_factor_matches_a_hand_calculation() -> None:
    # S = [1 .6 0; .6 1 .8; 0 .8 1]. All d are 1: image 0 is the first pivot, column (1, .6, 0). What remains is 0, .64
    # and 1: image 2 is the second pivot, column (0, .8, 1).
    z_ND = torch.tensor([[2.0, 0.0], [0.6, 0.8], [0.0, 5.0]])
    expected = torch.tensor([[1.0, 0.0], [0.6, 0.8], [0.0, 1.0]], dtype=torch.float64)
    torch.testing.assert_close(similarity_factor(z_ND), expected)
    torch.testing.assert_close(similarity_factor(z_ND.double() @ rotation(2)), expected)


@pytest.mark.parametrize("case", HARD)
def test_the_factor_reproduces_the_similarities(case: str) -> None:
    factor = similarity_factor(HARD[case])
    assert factor.shape == HARD[case].shape
    np.testing.assert_allclose((factor @ factor.T).numpy(), cosines(HARD[case]), atol=2e-10)
    lengths = HARD[case].norm(dim=1).sign()  # 1, or 0 for a zero row
    torch.testing.assert_close(factor.norm(dim=1), lengths, rtol=0, atol=1e-10)


@pytest.mark.parametrize("case", HARD)
def test_the_factor_is_the_pivoted_cholesky_factor_of_the_matrix(case: str) -> None:
    """The result depends only on the matrix, although the matrix is not computed."""
    found = similarity_factor(HARD[case]).numpy()
    np.testing.assert_allclose(found, textbook(cosines(HARD[case]), HARD[case].shape[1]), atol=1e-7)


@pytest.mark.parametrize("case", HARD)
def test_rotations_and_reflections_do_not_change_the_factor(case: str) -> None:
    z_ND = HARD[case]
    expected = similarity_factor(z_ND)
    for seed in range(5):
        turn = rotation(z_ND.shape[1], seed)
        torch.testing.assert_close(similarity_factor(z_ND @ turn), expected, rtol=0, atol=1e-9)
        turn[:, 0] *= -1  # and a reflection
        torch.testing.assert_close(similarity_factor(z_ND @ turn), expected, rtol=0, atol=1e-9)


def test_additional_dimensions_of_a_wider_network_only_add_columns_of_zeros() -> None:
    """The same similarities from a space of more dimensions give the same numbers."""
    z_ND = standard_normal(40, 8)
    wide = torch.cat([z_ND, torch.zeros(40, 5)], dim=1) @ rotation(13)
    padded = torch.cat([similarity_factor(z_ND), torch.zeros(40, 5)], dim=1)
    torch.testing.assert_close(similarity_factor(wide), padded, rtol=0, atol=1e-9)
    torch.testing.assert_close(similarity_factor(z_ND, 13), padded, rtol=0, atol=0)


@pytest.mark.parametrize("case", HARD)
def test_the_rows_of_the_pivots_are_triangular(case: str) -> None:
    factor = similarity_factor(HARD[case])
    rank = np.linalg.matrix_rank(cosines(HARD[case]), tol=1e-8)
    assert bool((factor[:, rank:] == 0).all())
    columns = factor[:, :rank]
    assert bool((columns.abs().amax(dim=0) > 0).all())
    for k in range(rank):
        leaders = columns[:, k] > 0
        zeros_behind = columns[:, k + 1 :].abs().amax(dim=1) < 1e-6 if k + 1 < rank else torch.ones_like(leaders)
        assert bool((leaders & zeros_behind).any()), f"no image has its last number in column {k}"


@given(st.integers(1, 30), st.integers(1, 10), st.integers(1, 10), st.integers(0, 10**6))
@settings(max_examples=60, deadline=None)
def test_random_shapes_and_ranks_are_reproduced_and_ignore_rotations(
    num: int, width: int, rank: int, seed: int
) -> None:
    z_ND = standard_normal(num, rank, seed=seed) @ standard_normal(rank, width, seed=seed + 1)
    factor = similarity_factor(z_ND)
    np.testing.assert_allclose((factor @ factor.T).numpy(), cosines(z_ND), atol=2e-10)
    torch.testing.assert_close(similarity_factor(z_ND @ rotation(width, seed)), factor, rtol=0, atol=1e-6)


def test_rotations_in_single_precision_change_the_factor_only_slightly() -> None:
    """A network gives embeddings in single precision: S differs in the seventh digit, and so does its factor."""
    z_ND = standard_normal(400, 32).float()
    turned = z_ND @ rotation(32).float()
    torch.testing.assert_close(similarity_factor(turned), similarity_factor(z_ND), rtol=0, atol=1e-5)


def test_the_factor_is_reproducible_bit_for_bit() -> None:
    z_ND = some_with_twins(300, 40).float()
    assert torch.equal(similarity_factor(z_ND), similarity_factor(z_ND.clone()))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("row", [0, 7])
def test_embeddings_that_are_not_finite_give_a_factor_that_is_not_finite(value: float, row: int) -> None:
    z_ND = standard_normal(10, 4)
    z_ND[row, 1] = value
    assert not bool(similarity_factor(z_ND).isfinite().all())


def test_too_few_columns_are_refused() -> None:
    assert similarity_factor(standard_normal(3, 8), 3).shape == (3, 3)
    with pytest.raises(ValueError, match="10 embeddings of 4 numbers needs 4 columns, not 3"):
        similarity_factor(standard_normal(10, 4), 3)
