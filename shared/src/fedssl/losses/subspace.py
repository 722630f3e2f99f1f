"""SSD's dimension-scaled regularisation: each client is drawn towards its own dimensions."""

import math
from typing import Literal

import torch
from torch import Tensor

from fedssl.losses._embeddings import check_variant, check_width, full_precision
from fedssl.unit_vectors import unit

# A target that is closer than this to its embedding, in units of the rounding error, counts as equal to it.
ROUNDING = 64


def dimension_scaled(
    z_BD: Tensor,
    scale_D: Tensor,
    rotation_DD: Tensor | None = None,
    variant: Literal["reference", "paper"] = "reference",
) -> Tensor:
    """Return the distance from the embeddings to a copy that is stretched along the client's own dimensions.

    With S = Q diag(d) Q^T (without a rotation, Q is the identity),

        reference: L = || U - n(sg(U S)) ||_F / B,   U = n(z)     (the root of the batch's sum, unsquared, over B)
        paper:     L = mean_i || z_i - sg(z_i S) ||^2,            (z as given, normalised or not)

    The gradient flows through the embedding only, not through its stretched copy. If the two are equal except for
    rounding, as with d = 1, the reference variant is 0 with a gradient of 0 (the gradient of the unsquared norm would
    turn the rounding error into a step of full length).

    Args:
        z_BD: embeddings.
        scale_D: d, the client's alpha on its own dimensions and 1 elsewhere.
        rotation_DD: Q, the orthonormal basis to which the dimensions refer; its columns are the basis vectors.
        variant: "reference" by default, because the published numbers come from the authors' code. Its gradient is
            about 0.016 times that of the paper's equation on unit vectors, so gamma = 1 means different things.

    Returns:
        The loss of the batch; the method averages it over the views.

    Example:
        >>> import torch
        >>> z, scale = torch.tensor([[3.0, 4.0]]), torch.tensor([2.0, 1.0])
        >>> round(float(dimension_scaled(z, scale)), 4)  # (0.6, 0.8) against (0.8321, 0.5547)
        0.3377
        >>> float(dimension_scaled(z, scale, variant="paper"))  # (3, 4) against (6, 4)
        9.0

    Reference: SSD Eq. 6-7. Deviations of the default from Eq. 7, as in the authors' code: unit vectors, a rotation, a
    renormalised target, and no square.
    """
    check_width(z_BD=z_BD)
    width = z_BD.shape[1]
    if scale_D.shape != (width,):
        raise ValueError(f"scale_D must have shape ({width},), not {tuple(scale_D.shape)}")
    if rotation_DD is not None and rotation_DD.shape != (width, width):
        raise ValueError(f"rotation_DD must have shape ({width}, {width}), not {tuple(rotation_DD.shape)}")
    check_variant(variant, ("reference", "paper"))
    rotations = [] if rotation_DD is None else [rotation_DD.detach()]
    with full_precision(z_BD, scale_D.detach(), *rotations) as (z_BD, scale_D, *basis):
        if variant == "paper":
            return (z_BD - _stretched(z_BD.detach(), scale_D, *basis)).square().sum(dim=1).mean()
        unit_BD = unit(z_BD)
        target_BD = unit(_stretched(unit_BD.detach(), scale_D, *basis))
        distance = torch.linalg.vector_norm(unit_BD - target_BD)
        smallest = ROUNDING * torch.finfo(distance.dtype).eps * math.sqrt(len(z_BD))
        return torch.where(distance > smallest, distance, 0.0) / len(z_BD)


def _stretched(z_BD: Tensor, scale_D: Tensor, rotation_DD: Tensor | None = None) -> Tensor:
    return z_BD * scale_D if rotation_DD is None else (z_BD @ rotation_DD * scale_D) @ rotation_DD.T
