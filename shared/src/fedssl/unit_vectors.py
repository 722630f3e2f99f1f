"""Unit vectors: for losses, where a length that overflows must be noticed, and for what is only measured or sent."""

import torch
import torch.nn.functional as F
from torch import Tensor

# A row shorter than this has no direction (the bound that torch.nn.functional.normalize uses).
SHORTEST = 1e-12


def unit(z_BD: Tensor) -> Tensor:
    """Return the rows scaled to unit length; a row shorter than `SHORTEST` becomes zero and gets no gradient.

    `torch.nn.functional.normalize` would give such a row a gradient that is 1e12 times too large. A row whose length
    overflows (from 1.8e19 on in float32) becomes NaN: training has diverged, and zeros would hide it.
    """
    norm_B1 = torch.linalg.vector_norm(z_BD, dim=-1, keepdim=True)
    length_B1 = torch.where(norm_B1 < torch.inf, norm_B1, torch.nan)
    return z_BD / torch.where(norm_B1 > SHORTEST, length_B1, torch.inf)


def directions(h_NH: Tensor) -> Tensor:
    """Return the rows with length 1, without gradients; a row of zeros stays zero.

    Each row is first divided by a power of two near its largest number, which changes no bit of the result. Otherwise
    `normalize` takes rows shorter than 1e-12 for zeros, and the squares of numbers above 1e19 exceed float32.
    """
    h_NH = h_NH.detach()
    largest_N1 = h_NH.abs().amax(dim=1, keepdim=True)
    power_N1 = largest_N1 / (2 * torch.frexp(largest_N1).mantissa)
    return F.normalize(h_NH / torch.where(power_N1 > 0, power_N1, 1), dim=1)
