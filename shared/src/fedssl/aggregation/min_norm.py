"""The shortest vector in the convex hull of gradients, by Wolfe's active-set method on their Gram matrix."""

import torch
from torch import Tensor

from fedssl.aggregation.mean import AggregationError

# A descent, or a weight, that is smaller counts as zero. Relative to the square of the longest gradient.
TOLERANCE = 1e-12
# Columns of the gradients converted to float64 at a time.
COLUMNS = 1 << 16


def min_norm_weights(gradients_KP: Tensor) -> Tensor:
    """Return the weights of the shortest convex combination of gradients.

        w = argmin_{w >= 0, sum w = 1} || sum_k w_k g_k ||^2

    The combination -sum_k w_k g_k is a descent direction for every client, unless the weights are already at a
    stationary point of all clients. If several weights give the same shortest vector, one of them is returned.

    Args:
        gradients_KP: one gradient per client.

    Returns:
        w_K, in the gradients' dtype (float32 at least), on their device.

    Raises:
        AggregationError: there are no gradients, or they are not finite.

    Example:
        >>> import torch
        >>> min_norm_weights(torch.tensor([[2.0, 0.0], [0.0, 1.0]]))  # (g2.g2 - g1.g2) / |g1 - g2|^2
        tensor([0.2000, 0.8000])

    Reference: MGDA (Desideri 2012; Sener and Koltun 2018, Eq. 3-4), the core of FedU2's aggregation. Deviation from the
    authors' code: an exact active-set method (Wolfe 1976) instead of 20 steps of projected gradient, which also limit
    the weights of two clients to 0.001 and 0.999.
    """
    if gradients_KP.ndim != 2 or 0 in gradients_KP.shape:
        raise AggregationError(f"gradients_KP must be a matrix with rows and columns, not {tuple(gradients_KP.shape)}")
    gradients_KP = gradients_KP.detach()
    gram_KK = gradients_KP.new_zeros((len(gradients_KP), len(gradients_KP)), dtype=torch.float64)
    for columns_KC in torch.split(gradients_KP, COLUMNS, dim=1):
        exact_KC = columns_KC.double()
        gram_KK += exact_KC @ exact_KC.T
    return min_norm_weights_from_gram(gram_KK).to(torch.promote_types(torch.float32, gradients_KP.dtype))


def min_norm_weights_from_gram(gram_KK: Tensor) -> Tensor:
    """Return the weights of the shortest convex combination of gradients, given all their scalar products.

        w = argmin_{w >= 0, sum w = 1} w^T G w

    The weights are optimal if no gradient's product with the combination is smaller than the combination's own square.

    Args:
        gram_KK: G, symmetric and positive semidefinite.

    Returns:
        w_K in float64, on the Gram matrix's device.

    Raises:
        AggregationError: the matrix is not square or not finite.

    Example:
        >>> import torch
        >>> min_norm_weights_from_gram(torch.tensor([[4.0, 0.0], [0.0, 1.0]]))
        tensor([0.2000, 0.8000], dtype=torch.float64)

    Reference: Wolfe (1976), Finding the nearest point in a polytope.
    """
    if gram_KK.ndim != 2 or gram_KK.shape[0] != gram_KK.shape[1] or 0 in gram_KK.shape:
        raise AggregationError(f"gram_KK must be a square matrix, not of shape {tuple(gram_KK.shape)}")
    if not gram_KK.isfinite().all():
        raise AggregationError("the gradients' scalar products are not all finite")
    gram = gram_KK.detach().to("cpu", torch.float64)
    num_clients, largest = len(gram), gram.diagonal().max()
    if largest <= 0:
        return torch.full((num_clients,), 1 / num_clients, dtype=torch.float64, device=gram_KK.device)
    gram = gram / largest
    support = [int(gram.diagonal().argmin())]
    weights = torch.zeros(num_clients, dtype=torch.float64)
    weights[support] = 1.0
    for _ in range(10 * num_clients + 10):  # each pass shortens the vector; the bound only guards against rounding
        products = gram @ weights
        entering = int(products.argmin())
        if entering in support or products[entering] >= weights @ products - TOLERANCE:
            break
        support.append(entering)
        support = _descend(gram, weights, support)
    return (weights / weights.sum()).to(gram_KK.device)


def _descend(gram: Tensor, weights: Tensor, support: list[int]) -> list[int]:
    """Move the weights to the shortest vector of the support's affine hull, and return the remaining support.

    A client whose weight becomes 0 on the way leaves the support.
    """
    while True:
        target = _affine_minimiser(gram[support][:, support])
        current = weights[support]
        if bool((target > TOLERANCE).all()):
            weights[support] = target
            return support
        blocked = target <= TOLERANCE
        steps = torch.where(blocked, current / (current - target).clamp_min(TOLERANCE), torch.inf)
        moved = current + steps.min().clamp(0, 1) * (target - current)
        moved[steps.argmin()] = 0.0
        weights[support] = torch.where(moved > TOLERANCE, moved, 0.0)
        support = [client for client in support if weights[client] > 0]


def _affine_minimiser(gram: Tensor) -> Tensor:
    """Return the weights of the shortest combination whose weights sum to 1, of any sign."""
    if len(gram) == 1:
        return torch.ones(1, dtype=gram.dtype)
    # Relative to the first: x = g_0 + sum_j t_j (g_j - g_0), where t solves the normal equations.
    to_first = gram[0, 1:] - gram[0, 0]
    normal = gram[1:, 1:] - gram[1:, :1] - gram[:1, 1:] + gram[0, 0]
    others = torch.linalg.lstsq(normal, -to_first[:, None], driver="gelsd").solution[:, 0]
    return torch.cat([1 - others.sum(dim=0, keepdim=True), others])
