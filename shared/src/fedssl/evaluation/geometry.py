"""The geometry of representations: rank, spread and angles. Only the angles between classes need labels.

Everything is computed in pieces and summed in float64: besides the representations themselves, memory grows with
H x H, never with N x N.
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from fedssl.unit_vectors import directions

_ROWS = 2048


def effective_rank(h_NH: Tensor, *, center: bool = False, normalize: bool = False) -> float:
    """Return exp of the entropy of the normalised singular values (SSD Eq. 11, after Roy and Vetterli 2007).

    Args:
        h_NH: representations (N, H) of a test set.
        center: subtract the mean first.
        normalize: scale each representation to length 1 first.

    Returns:
        A number between 1 (all on one line) and min(N, H); 0 if all representations are zero, NaN if there are none or
        some values are not finite because the training diverged. SSD does not state how it prepares h; the default does
        not change it, like Eq. 11.
    """
    if h_NH.numel() == 0 or not bool(h_NH.isfinite().all()):
        return math.nan
    # Singular values are the roots of the eigenvalues of H^T H, or of H H^T if that is smaller.
    wide = h_NH.shape[0] < h_NH.shape[1]
    pieces = [torch.cat(list(_pieces(h_NH, center=center, normalize=normalize))).T] if wide else None
    gram = sum(x.T @ x for x in pieces or _pieces(h_NH, center=center, normalize=normalize))
    assert isinstance(gram, Tensor), "there is a representation"
    eigenvalues = torch.linalg.eigvalsh(gram).clamp_min(0)
    # Set to zero what float64 cannot distinguish from zero: its root would count as a dimension.
    eigenvalues[eigenvalues < eigenvalues.max() * max(h_NH.shape) * torch.finfo(torch.float64).eps] = 0
    sigma = eigenvalues.sqrt()
    if float(sigma.sum()) == 0:
        return 0.0
    return float(torch.special.entr(sigma / sigma.sum()).sum().exp())


def feature_std(h_NH: Tensor) -> float:
    """Return the standard deviation of the unit vectors' coordinates, averaged over coordinates (SimSiam, section 4.1).

    1/sqrt(H) for directions spread evenly over the sphere, 0 for collapsed representations, NaN if there are none.
    """
    squares_H = sum(x.square().sum(dim=0) for x in _pieces(h_NH, center=True, normalize=True))
    return float((squares_H / len(h_NH)).sqrt().mean()) if isinstance(squares_H, Tensor) else math.nan


def uniformity(h_NH: Tensor, t: float = 2.0) -> float:
    """Return how evenly the directions fill the sphere; larger is better.

    This is -log mean_{i<j} exp(-t || n(h_i) - n(h_j) ||^2), the papers' -Lu (Wang and Isola 2020; SSD, section 5). It
    is about 3.98 for directions spread evenly in 512 dimensions, at most 4t, and 0 if all directions coincide, as those
    of zero vectors do. It is NaN for fewer than two representations, which have no pair.

    Each piece of rows is compared, in float32, only with itself and the rows after it; the potentials are summed in
    float64, as multiples of the largest one so far, so that they are not all 0 if t is large.
    """
    num_pairs = len(h_NH) * (len(h_NH) - 1) / 2
    if num_pairs == 0:
        return math.nan
    u_NH = directions(h_NH.float())
    squared_N = u_NH.square().sum(dim=1)  # 1, and 0 for zero vectors, which a dead ReLU makes
    total = torch.zeros((), dtype=torch.float64, device=h_NH.device)
    largest = total - torch.inf  # the logarithm of the largest potential
    for start in range(0, len(u_NH) - 1, _ROWS):
        rows_BH, rest_MH = u_NH[start : start + _ROWS], u_NH[start:]
        # || u - v ||^2 = || u ||^2 + || v ||^2 - 2 u.v; rounding may take it below 0.
        lengths_BM = squared_N[start : start + _ROWS, None] + squared_N[None, start:]
        exponent_BM = (lengths_BM - 2 * (rows_BH @ rest_MH.T)).clamp_min_(0).mul_(-t)
        own_BB = exponent_BM[:, : len(rows_BH)]  # its pairs below the diagonal are also above it
        own_BB.masked_fill_(torch.ones_like(own_BB, dtype=torch.bool).tril(), -torch.inf)
        before, largest = largest, torch.maximum(largest, exponent_BM.max().double())
        potential_BM = exponent_BM.sub_(largest.float()).exp_()
        total = total * (before - largest).exp() + potential_BM.sum(dtype=torch.float64)
    return -math.log(float(total) / num_pairs) - float(largest) if bool(total.isfinite()) else math.nan


def alignment(first_NH: Tensor, second_NH: Tensor) -> float:
    """Return the mean squared distance between the directions of two views (SSD Eq. 3); smaller is better.

    It is between 0 and 4, and NaN if there are no representations.
    """
    total = torch.zeros((), dtype=torch.float64, device=first_NH.device)
    for start in range(0, len(first_NH), _ROWS):
        u, v = (directions(x[start : start + _ROWS].double()) for x in (first_NH, second_NH))
        total += (u - v).square().sum()
    return float(total) / len(first_NH) if len(first_NH) else math.nan


def angle_between(local_ND: Tensor, global_ND: Tensor) -> Tensor:
    """Return the angle in degrees between the two embeddings of each sample (FedX Eq. 14): (N,), from 0 to 180.

    Args:
        local_ND, global_ND: embeddings of the same N samples under a client's model and the global one. FedX reports
            angles above 90 degrees, so it measures projector outputs: representations after a ReLU have none.
    """
    u_ND, v_ND = (directions(x.double()) for x in (local_ND, global_ND))
    # arccos of the cosine would lose half of the digits near 0 and 180 degrees.
    return torch.rad2deg(2 * torch.atan2((u_ND - v_ND).norm(dim=1), (u_ND + v_ND).norm(dim=1)))


def inter_class_angles(z_ND: Tensor, labels_N: Tensor) -> Tensor:
    """Return the angles in degrees between the mean embeddings of every two classes (FedX Eq. 15-16).

    Their shape is (C (C - 1) / 2,).
    """
    classes = torch.unique(labels_N)
    means_CD = torch.stack([z_ND[labels_N == label].detach().double().mean(dim=0) for label in classes])
    first, second = torch.triu_indices(len(classes), len(classes), offset=1, device=means_CD.device)
    return angle_between(means_CD[first], means_CD[second])


def _pieces(h_NH: Tensor, *, center: bool, normalize: bool) -> Iterator[Tensor]:
    """Yield the rows in float64 in pieces, scaled to unit length and with the mean subtracted if requested."""

    def prepared(start: int) -> Tensor:
        rows = h_NH[start : start + _ROWS].detach().double()
        return directions(rows) if normalize else rows

    starts = range(0, len(h_NH), _ROWS)
    mean_H = sum(prepared(start).sum(dim=0) for start in starts) / len(h_NH) if center and len(h_NH) else 0
    return (prepared(start) - mean_H for start in starts)
