"""VICReg and Barlow Twins compared with hand calculations and plain loops in float64, and their symmetries."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from fedssl.losses import barlow_twins, vicreg

Matrix = NDArray[np.float64]


def views(batch: int = 7, width: int = 5, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    z1, z2 = torch.randn(2, batch, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return z1, 0.5 * z1 + 0.3 * z2  # correlated, and some deviations below 1


def _loop_spread(z: Matrix) -> tuple[float, float]:
    covariance = np.cov(z, rowvar=False)
    width = z.shape[1]
    hinges = [max(0.0, 1 - math.sqrt(covariance[j, j] + 1e-4)) for j in range(width)]
    pairs = [covariance[i, j] ** 2 for i in range(width) for j in range(width) if i != j]
    return sum(hinges) / width, sum(pairs) / width


def test_vicreg_matches_hand_calculations() -> None:
    # View 1 has columns (1, -1) and (2, -2): variances 2 and 8, no hinge, covariance 4, so c1 = (16 + 16)/2.
    # View 2 has columns (0, 0) and (2, -2): variances 0 and 8, hinge 1 - 0.01, covariance 0, so v2 = 0.99/2.
    # They differ by 1 in both rows of the first column: squared distances of 1, or 1/2 per entry.
    z1, z2 = torch.tensor([[1.0, 2.0], [-1.0, -2.0]]), torch.tensor([[0.0, 2.0], [0.0, -2.0]])
    assert float(vicreg(z1, z2)) == pytest.approx(25 * 0.5 + 25 * 0.495 / 2 + 16, rel=1e-6)
    assert float(vicreg(z1, z2, variant="paper")) == pytest.approx(25 * 1 + 25 * 0.495 + 16, rel=1e-6)
    assert float(vicreg(z1, z2, 2, 0, 0)) == pytest.approx(1.0, rel=1e-6)
    assert float(vicreg(z1, z2, 0, 4, 0)) == pytest.approx(0.99, rel=1e-6)
    assert float(vicreg(z1, z2, 0, 0, 3)) == pytest.approx(48.0, rel=1e-6)


@pytest.mark.parametrize("seed", range(3))
def test_vicreg_equals_its_equations(seed: int) -> None:
    z1, z2 = views(seed=seed)
    a, b = z1.numpy(), z2.numpy()
    (v1, c1), (v2, c2) = _loop_spread(a), _loop_spread(b)
    distances = [sum((a[i, j] - b[i, j]) ** 2 for j in range(5)) for i in range(7)]
    assert v2 > 0, "the hinge must act"
    reference = 3 * sum(distances) / 35 + 4 * (v1 + v2) / 2 + 5 * (c1 + c2)
    paper = 3 * sum(distances) / 7 + 4 * (v1 + v2) + 5 * (c1 + c2)
    assert float(vicreg(z1, z2, 3, 4, 5)) == pytest.approx(reference, rel=1e-12)
    assert float(vicreg(z1, z2, 3, 4, 5, variant="paper")) == pytest.approx(paper, rel=1e-12)


@pytest.mark.parametrize("variant", ["reference", "paper"])
def test_vicreg_is_symmetric_and_ignores_shifts_and_the_order_of_features(variant: Any) -> None:
    z1, z2 = views()
    value = vicreg(z1, z2, variant=variant)
    torch.testing.assert_close(vicreg(z2, z1, variant=variant), value)
    shift, order = torch.arange(5.0), [4, 2, 0, 1, 3]
    torch.testing.assert_close(vicreg((z1 + shift)[:, order], (z2 + shift)[:, order], variant=variant), value)


def test_equal_decorrelated_views_of_deviation_one_have_no_loss() -> None:
    z = torch.tensor([[1.0, 1.0], [1.0, -1.0], [-1.0, 1.0], [-1.0, -1.0]])
    assert float(vicreg(z, z)) == 0.0
    assert float(barlow_twins(z, z)) == pytest.approx(0.0, abs=1e-9)


def test_barlow_twins_matches_hand_calculations() -> None:
    # Standardised, the columns are (1, -1), (1, -1) and (1, -1), (-1, 1): C is [[1, -1], [1, -1]].
    z1, z2 = torch.tensor([[1.0, 5.0], [-1.0, 1.0]]), torch.tensor([[300.0, 0.0], [-300.0, 400.0]])
    assert float(barlow_twins(z1, z2, 0.5)) == pytest.approx(4 + 0.5 * 2, rel=1e-4)
    assert float(barlow_twins(z1, z2)) == pytest.approx(4 + 0.0051 * 2, rel=1e-4)


@pytest.mark.parametrize("seed", range(3))
def test_barlow_twins_equals_its_equations(seed: int) -> None:
    z1, z2 = views(seed=seed)
    a, b = z1.numpy(), z2.numpy()
    total = 0.0
    for i in range(5):
        for j in range(5):
            x, y = a[:, i] - a[:, i].mean(), b[:, j] - b[:, j].mean()
            deviations = math.sqrt(np.mean(x**2) + 1e-5) * math.sqrt(np.mean(y**2) + 1e-5)
            correlation = float(np.mean(x * y)) / deviations
            total += (1 - correlation) ** 2 if i == j else 0.02 * correlation**2
    assert float(barlow_twins(z1, z2, 0.02)) == pytest.approx(total, rel=1e-12)


def test_barlow_twins_ignores_the_scale_shift_and_order_of_features() -> None:
    z1, z2 = views(batch=64)
    value, order = barlow_twins(z1, z2), [4, 2, 0, 1, 3]
    changed = z1 * torch.tensor([100.0, 2.0, 5.0, 50.0, 3.0]) + torch.arange(5.0)
    torch.testing.assert_close(barlow_twins(changed[:, order], z2[:, order]), value, rtol=1e-3, atol=0)
    torch.testing.assert_close(barlow_twins(z2, z1), value)


@pytest.mark.parametrize("loss", [vicreg, barlow_twins])
def test_a_single_sample_is_refused(loss: Any) -> None:
    with pytest.raises(ValueError, match="undefined for fewer than 2 samples"):
        loss(torch.ones(1, 3), torch.ones(1, 3))


@pytest.mark.parametrize("weight", [-1.0, math.nan, math.inf])
def test_invalid_weights_and_variants_are_refused(weight: float) -> None:
    z = torch.ones(2, 3)
    with pytest.raises(ValueError, match="covariance must be finite"):
        vicreg(z, z, covariance=weight)
    with pytest.raises(ValueError, match="off_diagonal must be finite"):
        barlow_twins(z, z, weight)
    with pytest.raises(ValueError, match="unknown variant 'printed'"):
        vicreg(z, z, variant="printed")  # type: ignore[arg-type]
