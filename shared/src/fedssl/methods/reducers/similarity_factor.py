"""A factor of a similarity matrix that depends only on the matrix.

S = R R^T of unit embeddings R does not change when R is rotated, so R reveals more than S: the axes of the client's
network. This is the L of S = L L^T that pivoted Cholesky finds, which in exact arithmetic is a function of S only:

    d = diag(S);   for k = 1, 2, ...:   p = the first image with d_p about the largest
                                        L_ik = (S_ip - sum_{j < k} L_ij L_pj) / sqrt(d_p),   d_i <- d_i - L_ik^2

Computed without S: the k-th step of Gram-Schmidt on the rows of the pivots gives a unit vector q_k, and L = R Q with
column k equal to R q_k. That is the same L, and since Q is orthonormal to rounding L L^T equals S to rounding, however
close to dependent the pivots are. O(N D^2) time, O(N D) memory.

"About the largest": the d of similar images are equal except for rounding, which differs if R is rotated. The first of
those within `_TIE` of the largest is the pivot, so the order of the images decides, not the last bit. What remains once
no d exceeds `_FLOOR` is rounding: its columns are zero, which changes S by at most `_FLOOR`.

Reference: Higham 1990, Analysis of the Cholesky decomposition of a semi-definite matrix.
"""

import torch
from torch import Tensor

from fedssl.unit_vectors import directions

_TIE = 1e-4
_FLOOR = 1e-10  # of squared lengths: float32 embeddings err by less, and the rounding of d is less than _TIE of it


def similarity_factor(z_ND: Tensor, width: int | None = None) -> Tensor:
    """Return L of the cosines of `z_ND`, float64 (N, width): L L^T = S, and L is the same for z Q with any rotation Q.

    Its rows have unit length, the pivots' are lower triangular with a positive diagonal, and columns beyond the rank
    are zero. `width` (None: D) must be at least min(N, D). A row of `z_ND` that is zero stays zero; one that is not
    finite makes the factor not finite.
    """
    unit_ND = directions(z_ND.double())
    size, dims = unit_ND.shape
    steps = min(size, dims)
    width = dims if width is None else width
    if width < steps:
        raise ValueError(f"a factor of {size} embeddings of {dims} numbers needs {steps} columns, not {width}")
    factor_WN = unit_ND.new_zeros(width, size)
    basis_KD = unit_ND.new_zeros(steps, dims)
    left_N = unit_ND.square().sum(dim=1)
    for k in range(steps):
        largest = left_N.max()
        if largest <= _FLOOR:
            break
        pivot = (left_N >= (1 - _TIE) * largest).to(torch.uint8).argmax()
        direction_D = unit_ND[pivot]
        for _ in range(2):  # a second pass removes the rounding error of the first
            direction_D = direction_D - (basis_KD[:k] @ direction_D) @ basis_KD[:k]
        basis_KD[k] = direction_D / direction_D.norm()
        factor_WN[k] = unit_ND @ basis_KD[k]
        left_N -= factor_WN[k].square()
    return factor_WN.T
