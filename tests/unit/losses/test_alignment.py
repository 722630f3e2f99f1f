"""Alignment and uniformity compared with hand calculations and plain loops."""

import math

import numpy as np
import pytest
import torch

from fedssl.losses import alignment, byol_regression, uniformity


def test_alignment_matches_a_hand_calculation() -> None:
    # Unit vectors (1, 0) and (0.7071, 0.7071): 0.2929^2 + 0.7071^2 = 0.5858; the second pair is equal: 0.
    z1, z2 = torch.tensor([[3.0, 0.0], [0.0, 1.0]]), torch.tensor([[2.0, 2.0], [0.0, 9.0]])
    assert float(alignment(z1, z2)) == pytest.approx(0.5857864376269049 / 2, rel=1e-6)


def test_uniformity_matches_a_hand_calculation() -> None:
    # Squared distances 2, 2 and 4 at t = 2: log[(e^-4 + e^-4 + e^-8) / 3].
    z = torch.tensor([[1.0, 0.0], [0.0, 2.0], [-3.0, 0.0]])
    assert float(uniformity(z)) == pytest.approx(-4.396348967229015, rel=1e-6)
    # One pair: -t times the squared distance.
    assert float(uniformity(z[:2], t=3.0)) == pytest.approx(-6.0, rel=1e-6)


@pytest.mark.parametrize("seed", range(3))
def test_alignment_and_uniformity_equal_their_equations(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    z1, z2 = torch.randn(2, 6, 5, generator=generator, dtype=torch.float64)
    u1, u2 = ([row / np.linalg.norm(row) for row in z.numpy()] for z in (z1, z2))
    aligned = np.mean([np.sum((a - b) ** 2) for a, b in zip(u1, u2, strict=True)])
    pairs = [np.exp(-1.5 * np.sum((u1[i] - u1[j]) ** 2)) for i in range(6) for j in range(i + 1, 6)]
    assert float(alignment(z1, z2)) == pytest.approx(aligned, rel=1e-12)
    assert float(uniformity(z1, t=1.5)) == pytest.approx(np.log(np.mean(pairs)), rel=1e-12)


def test_alignment_is_byols_loss_with_gradients_on_both_sides_and_zero_for_equal_views() -> None:
    z1, z2 = torch.randn(2, 6, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert float(alignment(z1, z2)) == pytest.approx(float(byol_regression(z1, z2)), rel=1e-12)
    assert float(alignment(z1, 3 * z1)) == pytest.approx(0, abs=1e-12)


def test_a_collapsed_batch_has_the_largest_uniformity_and_a_uniform_one_approaches_its_limit() -> None:
    collapsed = torch.ones(8, 5, requires_grad=True)
    value = uniformity(collapsed)
    value.backward()
    assert float(value.detach()) == pytest.approx(0, abs=1e-6)
    assert collapsed.grad is not None
    assert collapsed.grad.isfinite().all()
    # Points that are uniform on a sphere of many dimensions are nearly orthogonal: about -2 * 2; in 512 dimensions it
    # is -3.98.
    spread = torch.randn(512, 512, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert float(uniformity(spread)) == pytest.approx(-3.98, abs=0.01)


def test_coinciding_rows_repel_only_rows_in_other_places() -> None:
    z = torch.tensor([[1.0, 0.0], [2.0, 0.0], [0.0, 1.0]], dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(uniformity(z), z)
    # Potentials 1, e^-4, e^-4: each orthogonal pair has weight e^-4 / (1 + 2 e^-4); -2 d^2 has slope 4 along the other.
    weight = math.exp(-4) / (1 + 2 * math.exp(-4))
    expected = torch.tensor([[0.0, 4 * weight], [0.0, 2 * weight], [8 * weight, 0.0]], dtype=torch.float64)
    torch.testing.assert_close(gradient, expected)


def test_uniformity_requires_two_samples_and_a_positive_t() -> None:
    with pytest.raises(ValueError, match="fewer than 2 samples"):
        uniformity(torch.ones(1, 3))
    with pytest.raises(ValueError, match="t must be positive"):
        uniformity(torch.ones(2, 3), t=0)
