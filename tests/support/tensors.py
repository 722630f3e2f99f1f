"""Random tensors, and comparisons of named ones."""

from collections.abc import Mapping

import torch
from torch import Tensor


def standard_normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    """Return standard normal numbers, drawn in float64 whatever their type."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def are_equal(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    """Return whether both have tensors of the same names with the same values."""
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
