"""The first steps of every loss: check shapes, convert to full precision, take unit vectors."""

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

# A row shorter than this has no direction (the bound that torch.nn.functional.normalize uses).
SHORTEST = 1e-12


def check_width(**matrices: Tensor) -> None:
    """Raise ValueError unless all are matrices with rows and columns, and of the same width."""
    for name, matrix in matrices.items():
        if matrix.ndim != 2 or 0 in matrix.shape:
            raise ValueError(f"{name} must be a matrix with rows and columns, but has shape {tuple(matrix.shape)}")
    widths = {name: matrix.shape[1] for name, matrix in matrices.items()}
    if len(set(widths.values())) > 1:
        raise ValueError(f"all matrices must have one width, but theirs are {widths}")


def check_batch(minimum: int = 1, **matrices: Tensor) -> None:
    """Raise ValueError unless all are matrices of the same shape with at least `minimum` rows."""
    check_width(**matrices)
    sizes = {name: matrix.shape[0] for name, matrix in matrices.items()}
    if len(set(sizes.values())) > 1:
        raise ValueError(f"all matrices must have one batch size, but theirs are {sizes}")
    if min(sizes.values()) < minimum:
        raise ValueError(f"this loss is undefined for fewer than {minimum} samples: {sizes}")


def check_positive(**numbers: float) -> None:
    """Raise ValueError unless all numbers are positive and finite."""
    for name, number in numbers.items():
        if not (number > 0 and math.isfinite(number)):
            raise ValueError(f"{name} must be positive and finite, not {number}")


def check_variant(variant: str, known: tuple[str, ...]) -> None:
    """Raise ValueError if the variant does not exist."""
    if variant not in known:
        raise ValueError(f"unknown variant {variant!r}; there are {', '.join(known)}")


@contextmanager
def full_precision(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield the tensors in one dtype, at least float32, and turn autocast off inside the block.

    Autocast would compute a float32 matrix product in 16 bits. A cosine then has 3 digits, and a temperature of 0.07
    leaves fewer than 2 of them.
    """
    dtype = torch.float32
    for tensor in tensors:
        dtype = torch.promote_types(dtype, tensor.dtype)
    with torch.autocast(tensors[0].device.type, enabled=False):
        yield tuple(tensor.to(dtype) for tensor in tensors)


def unit(z_BD: Tensor) -> Tensor:
    """Return the rows scaled to unit length; a row shorter than `SHORTEST` becomes zero and gets no gradient.

    `torch.nn.functional.normalize` would give such a row a gradient that is 1e12 times too large. A row whose length
    overflows (from 1.8e19 on in float32) becomes NaN: training has diverged, and zeros would hide it.
    """
    norm_B1 = torch.linalg.vector_norm(z_BD, dim=-1, keepdim=True)
    length_B1 = torch.where(norm_B1 < torch.inf, norm_B1, torch.nan)
    return z_BD / torch.where(norm_B1 > SHORTEST, length_B1, torch.inf)
