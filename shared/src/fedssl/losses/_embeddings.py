"""The first steps of every loss: check shapes, and convert to full precision."""

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


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
