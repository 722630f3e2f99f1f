"""Alignment and uniformity on the unit sphere."""

import math

import torch
from torch import Tensor

from fedssl.losses._embeddings import check_batch, check_positive, full_precision
from fedssl.unit_vectors import unit


def alignment(z1_BD: Tensor, z2_BD: Tensor) -> Tensor:
    """Return the mean squared distance between the unit vectors of two views.

        L = mean_i || n(z1_i) - n(z2_i) ||^2

    Gradients flow into both views.

    Args:
        z1_BD, z2_BD: two views of B samples.

    Returns:
        The mean over the batch, between 0 and 4.

    Example:
        >>> import torch
        >>> float(alignment(torch.tensor([[3.0, 0.0]]), torch.tensor([[0.0, 2.0]])))
        2.0

    Reference: Wang and Isola (2020); SSD Eq. 3.
    """
    check_batch(z1_BD=z1_BD, z2_BD=z2_BD)
    with full_precision(z1_BD, z2_BD) as (z1_BD, z2_BD):
        return (unit(z1_BD) - unit(z2_BD)).square().sum(dim=1).mean()


def uniformity(z_BD: Tensor, t: float = 2.0) -> Tensor:
    """Return the logarithm of the mean Gaussian potential over all pairs of unit vectors.

        L = log mean_{i<j} exp(-t || n(z_i) - n(z_j) ||^2)

    A uniform distribution on the sphere minimises it. Rows that coincide have a gradient of zero with respect to each
    other.

    Args:
        z_BD: B >= 2 embeddings.
        t: the sharpness of the potential.

    Returns:
        The logarithm, between -4t and 0.

    Raises:
        ValueError: there are fewer than 2 rows, so there is no pair.

    Example:
        >>> import torch
        >>> float(uniformity(torch.tensor([[1.0, 0.0], [-5.0, 0.0]])))  # -2 * 2^2
        -8.0

    Reference: Wang and Isola (2020); SSD Eq. 4. Deviation from Eq. 4 as printed, which has the opposite sign: this is
    the value to minimise, as in the authors' code.
    """
    check_batch(2, z_BD=z_BD)
    check_positive(t=t)
    with full_precision(z_BD) as (z_BD,):
        unit_BD = unit(z_BD)
        length_B = unit_BD.square().sum(dim=1)
        distance_BB = (length_B[:, None] + length_B - 2 * unit_BD @ unit_BD.T).clamp_min(0)
        pairs_BB = torch.ones_like(distance_BB, dtype=torch.bool).triu(1)
        potential_BB = (-t * distance_BB).masked_fill(~pairs_BB, -torch.inf)
        num_pairs = len(z_BD) * (len(z_BD) - 1) // 2
        return potential_BB.flatten().logsumexp(dim=0) - math.log(num_pairs)
