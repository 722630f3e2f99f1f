"""FLESD's ensemble of the clients' similarities, row by row, without the matrix of all pairs."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from fedssl.aggregation.mean import AggregationError
from fedssl.unit_vectors import directions


def ensemble_similarity(
    representations: Sequence[Tensor],
    rows: Tensor | Sequence[int],
    anchors: Tensor | Sequence[int],
    temperature: float,
) -> Tensor:
    """Return the target distribution of given samples over given anchors: the mean of all clients' similarities.

        M_ij = 1/K sum_k exp(cos(R_k,i, R_k,j) / t),   p_ij = M_ij / sum_u M_iu   over the anchors u

    The similarities are sharpened by the temperature. Only the len(rows) x len(anchors) entries of the arguments are
    computed, as p = softmax_j logsumexp_k(cos / t). Shifting a row by the same number for all clients does not change
    p; the authors' code shifts by each client's row maximum, which is 1 for all clients, the diagonal. A row that is
    among its own anchors keeps its similarity of 1 to itself.

    Args:
        representations: one (N, d_k) tensor per client, of the same N samples; the widths d_k may differ.
        rows: indices of samples.
        anchors: indices of samples, which may repeat.
        temperature: t.

    Returns:
        p of shape (len(rows), len(anchors)), rows that sum to 1, in the representations' dtype (float32 at least).

    Raises:
        AggregationError: there are no clients or no anchors, the shapes differ, or the temperature is not positive.

    Example:
        >>> import torch
        >>> clients = [torch.eye(2), torch.tensor([[1.0], [3.0]])]  # orthogonal to one client, equal to the other
        >>> ensemble_similarity(clients, rows=[0], anchors=[0, 1], temperature=1.0)  # 2e to 1 + e
        tensor([[0.5938, 0.4062]])

    Reference: FLESD Eq. 4-6 and 8.
    """
    if not representations:
        raise AggregationError("there are no representations")
    if not temperature > 0:
        raise AggregationError(f"temperature must be positive, not {temperature}")
    sizes = [tuple(representation.shape) for representation in representations]
    if any(len(size) != 2 for size in sizes) or len({size[0] for size in sizes}) > 1:
        raise AggregationError(f"every client must represent the same samples, one per row; the shapes are {sizes}")
    device, dtype = representations[0].device, torch.float32
    for representation in representations:
        dtype = torch.promote_types(dtype, representation.dtype)
    row_index, anchor_index = (torch.as_tensor(index, dtype=torch.long, device=device) for index in (rows, anchors))
    if row_index.ndim != 1 or anchor_index.ndim != 1 or len(anchor_index) == 0:
        raise AggregationError("rows and anchors must be lists of indices, with at least one anchor")
    ensemble_RA = torch.full((len(row_index), len(anchor_index)), -torch.inf, dtype=dtype, device=device)
    with torch.no_grad(), torch.autocast(device.type, enabled=False):
        for representation in representations:
            row_RD, anchor_AD = (
                directions(representation.index_select(0, index).to(dtype)) for index in (row_index, anchor_index)
            )
            ensemble_RA = torch.logaddexp(ensemble_RA, row_RD @ anchor_AD.T / temperature)
        return F.softmax(ensemble_RA, dim=1)
