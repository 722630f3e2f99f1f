"""Unit vectors compared with values worked out by hand, from the shortest to the longest rows."""

import math

import pytest
import torch

from fedssl.losses import negative_cosine
from fedssl.losses._embeddings import unit


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
