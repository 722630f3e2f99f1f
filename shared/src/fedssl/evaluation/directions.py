"""The directions of representations, however long or short these are."""

import torch
import torch.nn.functional as F
from torch import Tensor


def directions(h_NH: Tensor) -> Tensor:
    """Return the rows with length 1, without gradients; a row of zeros stays zero.

    Each row is first divided by a power of two near its largest number, which changes no bit of the result. Otherwise
    `normalize` takes rows shorter than 1e-12 for zeros, and the squares of numbers above 1e19 exceed float32.
    """
    h_NH = h_NH.detach()
    largest_N1 = h_NH.abs().amax(dim=1, keepdim=True)
    power_N1 = largest_N1 / (2 * torch.frexp(largest_N1).mantissa)
    return F.normalize(h_NH / torch.where(power_N1 > 0, power_N1, 1), dim=1)
