"""What every loss does first: check shapes, go to full precision, take unit vectors."""

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

# A row shorter than this has no direction (the bound that torch.nn.functional.normalize uses).
SHORTEST = 1e-12


def check_width(**matrices: Tensor) -> None:
    """Refuse anything but matrices with at least one row and one common width."""
    for name, matrix in matrices.items():
        if matrix.ndim != 2 or 0 in matrix.shape:
            raise ValueError(f"{name} must be a matrix with rows and columns, not of shape {tuple(matrix.shape)}")
    widths = {name: matrix.shape[1] for name, matrix in matrices.items()}
    if len(set(widths.values())) > 1:
        raise ValueError(f"these must have one width: {widths}")


def check_batch(minimum: int = 1, **matrices: Tensor) -> None:
    """Refuse anything but matrices of one shape with at least `minimum` rows."""
    check_width(**matrices)
    sizes = {name: matrix.shape[0] for name, matrix in matrices.items()}
    if len(set(sizes.values())) > 1:
        raise ValueError(f"these must have one batch size: {sizes}")
    if min(sizes.values()) < minimum:
        raise ValueError(f"undefined for fewer than {minimum} samples: {sizes}")


def check_positive(**numbers: float) -> None:
    """Refuse numbers that are not positive and finite."""
    for name, number in numbers.items():
        if not (number > 0 and math.isfinite(number)):
            raise ValueError(f"{name} must be positive and finite, not {number}")


def check_variant(variant: str, known: tuple[str, ...]) -> None:
    """Refuse a variant that does not exist."""
    if variant not in known:
        raise ValueError(f"unknown variant {variant!r}; there are {', '.join(known)}")


@contextmanager
def full_precision(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield the tensors in one dtype, float32 at least, with autocast off inside.

    Autocast would take a float32 matrix product down to 16 bits, where a cosine has 3 digits and a temperature of 0.07
    leaves less than 2 of them.
    """
    dtype = torch.float32
    for tensor in tensors:
        dtype = torch.promote_types(dtype, tensor.dtype)
    with torch.autocast(tensors[0].device.type, enabled=False):
        yield tuple(tensor.to(dtype) for tensor in tensors)


def unit(z_BD: Tensor) -> Tensor:
    """Return the rows scaled to unit length; a row of zeros stays zero and gets no gradient.

    `torch.nn.functional.normalize` would pass a gradient 1e12 times too large there.
    """
    norm_B1 = torch.linalg.vector_norm(z_BD, dim=-1, keepdim=True)
    return z_BD / torch.where(norm_B1 > SHORTEST, norm_B1, torch.inf)
