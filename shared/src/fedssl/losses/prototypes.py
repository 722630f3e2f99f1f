"""ProtoCL: contrast with the prototypes of clusters, each with its own temperature."""

import torch
from torch import Tensor
from torch.nn import functional as F

from fedssl.group_sums import group_sums
from fedssl.losses._embeddings import check_positive, check_width, full_precision
from fedssl.unit_vectors import unit

# The smallest concentration, as a share of the temperature. Only clusters whose members coincide come near it.
FLOOR = 1e-3


def prototype_contrast(
    query_BD: Tensor, prototypes_MD: Tensor, assignments_B: Tensor, concentrations_M: Tensor
) -> Tensor:
    """Contrast each query's own prototype with all other prototypes.

        L = mean_i -log[ exp(q_i . c_s / phi_s) / sum_j exp(q_i . c_j / phi_j) ],   s = the cluster of i

    Queries and prototypes are normalised. The gradient flows into the queries only.

    Args:
        query_BD: embeddings of B samples.
        prototypes_MD: c, the centers of one clustering.
        assignments_B: s, the cluster of each query's sample, as integers.
        concentrations_M: phi, each cluster's temperature (`prototype_concentrations`).

    Returns:
        The mean over the batch; the method averages it over its clusterings.

    Example:
        >>> import torch
        >>> query, prototypes = torch.tensor([[2.0, 0.0]]), torch.eye(2)
        >>> loss = prototype_contrast(query, prototypes, torch.tensor([0]), torch.ones(2))
        >>> round(float(loss), 4)  # log(1 + 1/e)
        0.3133

    Reference: PCL (Li et al. 2021), Eq. 11. Deviation from the authors' code: all prototypes are negatives, not a
    sample of them.
    """
    check_width(query_BD=query_BD, prototypes_MD=prototypes_MD)
    if assignments_B.shape != (len(query_BD),):
        raise ValueError(f"assignments_B must have shape ({len(query_BD)},), not {tuple(assignments_B.shape)}")
    if concentrations_M.shape != (len(prototypes_MD),):
        raise ValueError(
            f"concentrations_M must have shape ({len(prototypes_MD)},), not {tuple(concentrations_M.shape)}"
        )
    with full_precision(query_BD, prototypes_MD.detach(), concentrations_M.detach()) as tensors:
        query_BD, prototypes_MD, concentrations_M = tensors
        logits_BM = unit(query_BD) @ unit(prototypes_MD).T / concentrations_M
        return F.cross_entropy(logits_BM, assignments_B)


def prototype_concentrations(
    embeddings_ND: Tensor, prototypes_MD: Tensor, assignments_N: Tensor, temperature: float
) -> Tensor:
    """Return a temperature for each cluster: the tighter the cluster, the smaller.

        phi_c = mean_{i in c} ||n(z_i) - c|| / log(n_c + 10)

    Clusters of fewer than two members get the largest phi. Then every phi is clipped to the 10th to 90th percentile
    (linear interpolation) and scaled to a mean of `temperature`. If so many members coincide that a clipped phi is 0,
    it is raised to a thousandth of the temperature; if all members of all clusters coincide, every phi is the
    temperature. There is no gradient.

    Args:
        embeddings_ND: the embeddings that were clustered.
        prototypes_MD: c, their centers, used as given.
        assignments_N: the cluster of each embedding, as integers.
        temperature: the mean that phi is scaled to.

    Returns:
        phi_M.

    Example:
        >>> import torch
        >>> z = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0], [0.6, 0.8]])
        >>> phi = prototype_concentrations(z, torch.eye(2), torch.tensor([0, 0, 1, 1]), temperature=0.1)
        >>> [round(value, 4) for value in phi.tolist()]  # 0 and x, clipped to 0.1x and 0.9x, then scaled
        [0.02, 0.18]

    Reference: PCL (Li et al. 2021), Eq. 12, and its authors' code for the clipping, the scale and small clusters.
    """
    check_width(embeddings_ND=embeddings_ND, prototypes_MD=prototypes_MD)
    if assignments_N.shape != (len(embeddings_ND),):
        raise ValueError(f"assignments_N must have shape ({len(embeddings_ND)},), not {tuple(assignments_N.shape)}")
    check_positive(temperature=temperature)
    with full_precision(embeddings_ND.detach(), prototypes_MD.detach()) as (embeddings_ND, prototypes_MD):
        offset_ND = unit(embeddings_ND) - prototypes_MD[assignments_N]
        distance_N = torch.linalg.vector_norm(offset_ND, dim=1)
        count_M, total_M = (
            group_sums(each, assignments_N, len(prototypes_MD)) for each in (torch.ones_like(distance_N), distance_N)
        )
        phi_M = total_M / count_M.clamp_min(1) / (count_M + 10).log()
        phi_M = torch.where(count_M > 1, phi_M, 0.0)
        phi_M = torch.where(count_M > 1, phi_M, phi_M.max())
        low, high = phi_M.quantile(phi_M.new_tensor([0.1, 0.9]))
        phi_M = phi_M.clamp(low, high)
        mean = phi_M.mean()
        scaled_M = torch.where(mean > 0, temperature * phi_M / mean, temperature)
        return scaled_M.clamp_min(FLOOR * temperature)
