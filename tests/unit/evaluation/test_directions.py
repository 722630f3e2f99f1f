"""The directions of representations, whatever their length."""

import pytest
import torch
import torch.nn.functional as F

from fedssl.evaluation import knn_accuracy, uniformity
from fedssl.evaluation.directions import directions


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
