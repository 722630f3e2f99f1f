"""The losses of BYOL and SimSiam compared with hand calculations and plain loops."""

import numpy as np
import pytest
import torch

from fedssl.losses import byol_regression, negative_cosine


def test_both_losses_match_hand_calculations() -> None:
    prediction, target = torch.tensor([[3.0, 0.0]]), torch.tensor([[2.0, 2.0]])
    # The angle is 45 degrees, its cosine 0.70710678: 2 - 1.41421356 and -0.70710678.
    assert float(byol_regression(prediction, target)) == pytest.approx(0.5857864376269049, rel=1e-6)
    assert float(negative_cosine(prediction, target)) == pytest.approx(-0.7071067811865475, rel=1e-6)
    # Opposite vectors: 2 + 2 and +1.
    assert float(byol_regression(prediction, -prediction)) == 4.0
    assert float(negative_cosine(prediction, -prediction)) == 1.0


@pytest.mark.parametrize("seed", range(3))
def test_both_losses_equal_their_equations(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    prediction, target = torch.randn(2, 6, 5, generator=generator, dtype=torch.float64)
    distances, cosines = [], []
    for p, t in zip(prediction.numpy(), target.numpy(), strict=True):
        p, t = p / np.linalg.norm(p), t / np.linalg.norm(t)
        distances.append(np.sum((p - t) ** 2))
        cosines.append(np.dot(p, t))
    assert float(byol_regression(prediction, target)) == pytest.approx(np.mean(distances), rel=1e-12)
    assert float(negative_cosine(prediction, target)) == pytest.approx(-np.mean(cosines), rel=1e-12)


def test_equal_views_give_the_minimum() -> None:
    z = torch.randn(6, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert float(byol_regression(z, 7 * z)) == pytest.approx(0, abs=1e-12)
    assert float(negative_cosine(z, 7 * z)) == pytest.approx(-1, rel=1e-12)
