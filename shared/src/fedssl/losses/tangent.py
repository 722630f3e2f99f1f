"""FedU2's flexible uniform regulariser: match uniform samples of the sphere, projected to many tangent planes."""

import torch
from torch import Tensor

from fedssl.losses._embeddings import check_batch, check_positive, check_width, full_precision
from fedssl.unit_vectors import unit

# If 1 - cos is smaller than this, angle / sine is taken from its power series: at 0 the quotient is 0/0.
SERIES_BELOW = 1e-3
# angle / sine as a power series in u = 1 - cos, highest power first; the next term is below 1e-16.
SERIES = (8 / 315, 2 / 35, 2 / 15, 1 / 3, 1.0)
# Closer than this to the antipode, the log map has no direction.
ANTIPODE = 1e-6


def tangent_sliced_wasserstein(
    z_BD: Tensor, samples_BD: Tensor, tangents_JD: Tensor, projections_JPD: Tensor
) -> Tensor:
    """Return the sliced Wasserstein-2 distance between embeddings and samples, in the tangent planes of given points.

        L = mean_{j,p,i} ( sort_i <Log_tj(n(z)), w_jp> - sort_i <Log_tj(n(s)), w_jp> )^2

    where Log_t(x) = angle(t, x) (x - <x, t> t) / ||x - <x, t> t|| is the log map of the unit sphere. All tangent
    points are computed at once. The gradient flows into z only.

    Args:
        z_BD: embeddings.
        samples_BD: the points to match, as many as there are embeddings.
        tangents_JD: the tangent points t.
        projections_JPD: P directions w for each tangent point.

    Returns:
        The mean over tangent points, directions and ranks.

    Example:
        >>> import torch
        >>> east, north = torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 1.0]])
        >>> round(float(tangent_sliced_wasserstein(north, east, east, north[None])), 4)  # (pi/2)^2
        2.4674

    Reference: FedU2 (Liao et al. 2024), the regulariser as in its authors' code.
    """
    check_batch(z_BD=z_BD, samples_BD=samples_BD)
    check_width(z_BD=z_BD, tangents_JD=tangents_JD)
    if projections_JPD.ndim != 3 or projections_JPD.shape[::2] != tangents_JD.shape or 0 in projections_JPD.shape:
        shapes = tuple(projections_JPD.shape), tuple(tangents_JD.shape)
        raise ValueError(f"projections_JPD of shape {shapes[0]} does not fit tangents_JD of shape {shapes[1]}")
    with full_precision(z_BD, samples_BD.detach(), tangents_JD.detach(), projections_JPD.detach()) as tensors:
        z_BD, samples_BD, tangents_JD = (unit(tensor) for tensor in tensors[:3])
        sorted_JPB = [
            _projected_log_map(points_BD, tangents_JD, tensors[3]).sort(dim=2).values
            for points_BD in (z_BD, samples_BD)
        ]
        return (sorted_JPB[0] - sorted_JPB[1]).square().mean()


def flexible_uniform_regularizer(
    z_BD: Tensor, generator: torch.Generator, num_projections: int = 6, divisor: float = 6.0
) -> Tensor:
    """Return the distance of the embeddings from a uniform distribution on the sphere, by random tangent planes.

        L = B/divisor * tangent_sliced_wasserstein(z, S, t, w)
          = 1/divisor sum_{j=1..B} mean_{p,i} ( sort_i <Log_tj(n(z)), w_jp> - sort_i <Log_tj(S), w_jp> )^2

    with B points S and B tangent points t uniform on the sphere and directions w ~ N(0, I), drawn from the generator.
    The gradient flows into z only.

    Args:
        z_BD: embeddings.
        generator: the source of all randomness; a generator on z's device avoids a copy.
        num_projections: directions for each tangent point.
        divisor: the reference code divides the sum over all B tangent points by 6, so its value grows with B.

    Returns:
        The regulariser; the method adds 0.01 times it for each view.

    Example:
        >>> import torch
        >>> z = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
        >>> spread = flexible_uniform_regularizer(z, torch.Generator().manual_seed(1))
        >>> collapsed = flexible_uniform_regularizer(z + 5, torch.Generator().manual_seed(1))
        >>> bool(spread < collapsed)
        True

    Reference: FedU2 (Liao et al. 2024). Deviation from the paper, which states an unbalanced transport to a spherical
    Gaussian: this is the tangent-space distance of the authors' code, vectorised over the tangent points.
    """
    check_width(z_BD=z_BD)
    check_positive(num_projections=num_projections, divisor=divisor)
    batch, width = z_BD.shape
    dtype = torch.promote_types(torch.float32, z_BD.dtype)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=generator.device, dtype=dtype).to(z_BD.device)

    tangents_BD, samples_BD = normal(batch, width), normal(batch, width)
    distance = tangent_sliced_wasserstein(z_BD, samples_BD, tangents_BD, normal(batch, num_projections, width))
    return distance * (batch / divisor)


def _projected_log_map(x_BD: Tensor, tangents_JD: Tensor, projections_JPD: Tensor) -> Tensor:
    """Return <Log_t(x), w> for unit x and t, without allocating the (J, B, D) tensor of log maps."""
    cosine_JB = tangents_JD @ x_BD.T
    along_JP = (projections_JPD * tangents_JD[:, None]).sum(dim=2)
    tangential_JPB = projections_JPD @ x_BD.T - along_JP[:, :, None] * cosine_JB[:, None]
    return _angle_over_sine(cosine_JB)[:, None] * tangential_JPB


def _angle_over_sine(cosine: Tensor) -> Tensor:
    """Return the angle divided by its sine, smooth where the angle is 0 and bounded at the antipode."""
    u = (1 - cosine).clamp(0, 2 - ANTIPODE)
    near = u < SERIES_BELOW
    series = torch.zeros_like(u)
    for coefficient in SERIES:
        series = series * u + coefficient
    # Where the series is used, the quotient is computed from 1, so that its gradient is finite everywhere.
    safe = torch.where(near, 1.0, u)
    quotient = (1 - safe).acos() * (safe * (2 - safe)).rsqrt()
    return torch.where(near, series, quotient)
