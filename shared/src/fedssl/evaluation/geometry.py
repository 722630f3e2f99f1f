"""How representations lie in their space: rank, spread and angles. No labels needed but for the classes' angles."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor


def effective_rank(h_NH: Tensor, *, center: bool = False, normalize: bool = False) -> float:
    """exp of the entropy of the normalised singular values (SSD Eq. 11, after Roy and Vetterli 2007).

    Args:
        h_NH: representations (N, H) of a test set.
        center: subtract the mean first.
        normalize: scale each representation to length 1 first.

    Returns:
        Between 1 (all on one line) and min(N, H); 0 if all are zero, NaN if a training run that
        diverged left values that are not finite. SSD does not say how it prepares h; the default takes it raw, as its
        Eq. 11 does.
    """
    h_NH = h_NH.detach().double()
    if not bool(h_NH.isfinite().all()):
        return math.nan
    if normalize:
        h_NH = F.normalize(h_NH, dim=1)
    if center:
        h_NH = h_NH - h_NH.mean(dim=0)
    sigma = torch.linalg.svdvals(h_NH)
    if float(sigma.sum()) == 0:
        return 0.0
    return float(torch.special.entr(sigma / sigma.sum()).sum().exp())


def feature_std(h_NH: Tensor) -> float:
    """Standard deviation of the unit vectors' coordinates, averaged over coordinates (SimSiam, section 4.1).

    1/sqrt(H) for directions spread evenly over the sphere, 0 for collapsed representations.
    """
    return float(F.normalize(h_NH.detach().double(), dim=1).std(dim=0, correction=0).mean())


def angle_between(local_ND: Tensor, global_ND: Tensor) -> Tensor:
    """Angle in degrees between the two embeddings of each sample (FedX Eq. 14): (N,), from 0 to 180.

    Args:
        local_ND, global_ND: embeddings of the same N samples under a client's model and the global one. FedX reports
            angles above 90 degrees, so it measures projector outputs: representations after a ReLU have none.
    """
    u_ND, v_ND = (F.normalize(x.detach().double(), dim=1) for x in (local_ND, global_ND))
    # arccos of the cosine would lose half of the digits near 0 and 180 degrees.
    return torch.rad2deg(2 * torch.atan2((u_ND - v_ND).norm(dim=1), (u_ND + v_ND).norm(dim=1)))


def inter_class_angles(z_ND: Tensor, labels_N: Tensor) -> Tensor:
    """Angles in degrees between the mean embeddings of every two classes (FedX Eq. 15-16): (C (C - 1) / 2,)."""
    classes = torch.unique(labels_N)
    means_CD = torch.stack([z_ND[labels_N == label].detach().double().mean(dim=0) for label in classes])
    first, second = torch.triu_indices(len(classes), len(classes), offset=1, device=means_CD.device)
    return angle_between(means_CD[first], means_CD[second])
