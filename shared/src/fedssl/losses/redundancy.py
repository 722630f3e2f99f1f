"""Redundancy reduction: views agree, and no feature repeats another or is constant (VICReg, Barlow Twins)."""

import math
from typing import Literal

import torch
from torch import Tensor

from fedssl.losses._embeddings import check_batch, check_variant, full_precision

# Added to a variance before taking its root.
VICREG_EPSILON = 1e-4  # VICReg Eq. 2
BARLOW_EPSILON = 1e-5  # that of BatchNorm, with which the authors' code standardises


def vicreg(
    z1_BD: Tensor,
    z2_BD: Tensor,
    invariance: float = 25.0,
    variance: float = 25.0,
    covariance: float = 1.0,
    variant: Literal["reference", "paper"] = "reference",
) -> Tensor:
    """Return the weighted sum of the invariance, the variances and the covariances of two views.

        v(Z) = 1/D sum_j max(0, 1 - sqrt(Var(z_j) + 1e-4)),  c(Z) = 1/D sum_{i != j} Cov(Z)_ij^2
        reference: L = invariance mean_{i, j} (z1 - z2)_ij^2 + variance (v1 + v2) / 2 + covariance (c1 + c2)
        paper:     L = invariance mean_i || z1_i - z2_i ||^2 + variance (v1 + v2)     + covariance (c1 + c2)

    Variances and covariances are unbiased. Embeddings are used as they are, un-normalised. Gradients flow into both
    views.

    Args:
        z1_BD, z2_BD: two views of B >= 2 samples.
        invariance, variance, covariance: the weights lambda, mu and nu, not negative.
        variant: "reference" by default, because the published weights belong to it.

    Returns:
        The loss, not negative.

    Raises:
        ValueError: there are fewer than 2 samples, so there is no variance.

    Example:
        >>> import torch
        >>> z1, z2 = torch.tensor([[1.0, 1.0], [-1.0, 1.0]]), torch.tensor([[1.0, 0.0], [-1.0, 0.0]])
        >>> [round(float(vicreg(z1, z2, variant=v)), 3) for v in ("reference", "paper")]  # v1 = v2 = 0.99 / 2
        [24.875, 49.75]

    Reference: VICReg (Bardes et al. 2022), Eq. 1 to 6. Deviation of the default: the distance is also averaged over the
    dimensions, and the variance terms are averaged over the views, as in the authors' code.
    """
    check_batch(2, z1_BD=z1_BD, z2_BD=z2_BD)
    check_variant(variant, ("reference", "paper"))
    _check_weights(invariance=invariance, variance=variance, covariance=covariance)
    with full_precision(z1_BD, z2_BD) as (z1_BD, z2_BD):
        squares_BD = (z1_BD - z2_BD).square()
        distance = squares_BD.mean() if variant == "reference" else squares_BD.sum(dim=1).mean()
        (v1, c1), (v2, c2) = _spread(z1_BD), _spread(z2_BD)
        spread = (v1 + v2) / 2 if variant == "reference" else v1 + v2
        return invariance * distance + variance * spread + covariance * (c1 + c2)


def barlow_twins(z1_BD: Tensor, z2_BD: Tensor, off_diagonal: float = 0.0051) -> Tensor:
    """Return the distance of two views' cross-correlation matrix from the identity.

        C = x1^T x2 / B      (x: z with each column standardised over the batch, biased, 1e-5 under the root)
        L = sum_i (1 - C_ii)^2 + off_diagonal sum_{i != j} C_ij^2

    It is a sum over the dimensions, not a mean. Gradients flow into both views, and through means and variances.

    Args:
        z1_BD, z2_BD: two views of B >= 2 samples.
        off_diagonal: lambda, the weight of the redundancy term, not negative.

    Returns:
        The sum, not negative.

    Raises:
        ValueError: there are fewer than 2 samples, so there is no correlation.

    Example:
        >>> import torch
        >>> z1, z2 = torch.tensor([[1.0, 5.0], [-1.0, 1.0]]), torch.tensor([[3.0, 0.0], [-3.0, 4.0]])
        >>> round(float(barlow_twins(z1, z2, off_diagonal=0.5)), 3)  # C is [[1, -1], [1, -1]]: 0 + 2^2 + 0.5 * 2
        5.0

    Reference: Barlow Twins (Zbontar et al. 2021), Eq. 1 and 2.
    """
    check_batch(2, z1_BD=z1_BD, z2_BD=z2_BD)
    _check_weights(off_diagonal=off_diagonal)
    with full_precision(z1_BD, z2_BD) as (z1_BD, z2_BD):
        correlation_DD = _standardised(z1_BD).T @ _standardised(z2_BD) / len(z1_BD)
        on_diagonal = (1 - correlation_DD.diagonal()).square().sum()
        return on_diagonal + off_diagonal * _off_diagonal(correlation_DD.square()).sum()


def _spread(z_BD: Tensor) -> tuple[Tensor, Tensor]:
    """Return v(Z) and c(Z) of VICReg."""
    batch, width = z_BD.shape
    centred_BD = z_BD - z_BD.mean(dim=0)
    deviation_D = (centred_BD.square().sum(dim=0) / (batch - 1) + VICREG_EPSILON).sqrt()
    covariance_DD = centred_BD.T @ centred_BD / (batch - 1)
    return torch.relu(1 - deviation_D).mean(), _off_diagonal(covariance_DD.square()).sum() / width


def _standardised(z_BD: Tensor) -> Tensor:
    centred_BD = z_BD - z_BD.mean(dim=0)
    return centred_BD * (centred_BD.square().mean(dim=0) + BARLOW_EPSILON).rsqrt()


def _off_diagonal(matrix_DD: Tensor) -> Tensor:
    """Return the matrix with zeros on its diagonal."""
    return matrix_DD.masked_fill(torch.eye(len(matrix_DD), dtype=torch.bool, device=matrix_DD.device), 0)


def _check_weights(**weights: float) -> None:
    for name, weight in weights.items():
        if not (weight >= 0 and math.isfinite(weight)):
            raise ValueError(f"{name} must be finite and not negative, not {weight}")
