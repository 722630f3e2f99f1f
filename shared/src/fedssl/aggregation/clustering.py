"""Clustering on the unit sphere: spherical k-means, and Orchestra's balanced clustering on clients and server."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from fedssl.aggregation.mean import AggregationError
from fedssl.group_sums import group_sums
from fedssl.unit_vectors import directions

_MOST_COSINES = 1 << 26  # at once: 256 MB


class Clustering(NamedTuple):
    """Unit centroids (M, D) and, for each of N samples, the index of its centroid.

    Example:
        >>> import torch
        >>> Clustering(centroids=torch.eye(2), assignments=torch.tensor([0, 1, 1])).assignments
        tensor([0, 1, 1])
    """

    centroids: Tensor
    assignments: Tensor


def spherical_kmeans(
    embeddings_ND: Tensor, num_clusters: int, *, generator: torch.Generator, num_iterations: int = 20
) -> Clustering:
    """Run k-means by cosine, starting from randomly chosen samples.

        s_i = argmax_m cos(z_i, c_m),   c_m = n(sum_{i: s_i = m} n(z_i))

    A cluster that loses all its members starts again at the sample that is farthest from its own centroid. The smaller
    index wins a tie. Clusters may still be empty at the end.

    Args:
        embeddings_ND: N >= num_clusters embeddings.
        num_clusters: M.
        generator: draws the samples to start from.
        num_iterations: the number of updates of the centroids.

    Returns:
        The centroids and the assignments to them.

    Raises:
        AggregationError: there are fewer samples than clusters.

    Example:
        >>> import torch
        >>> z = torch.tensor([[1.0, 0.0], [5.0, 0.1], [0.0, 1.0], [0.1, 2.0]])
        >>> s = spherical_kmeans(z, 2, generator=torch.Generator().manual_seed(0)).assignments
        >>> bool(s[0] == s[1] != s[2] == s[3])
        True

    Reference: PCL (Li et al. 2021), the E-step. Deviation: one start of cosine k-means; the authors' code takes the
    best of 5 Euclidean runs on unit vectors.
    """
    unit_ND = _checked_units(embeddings_ND, num_clusters)
    centroids_MD = unit_ND[_distinct(len(unit_ND), num_clusters, generator, unit_ND.device)]
    for _ in range(num_iterations):
        fit_N, assignments_N = _nearest(unit_ND, centroids_MD)
        worst_M = fit_N.argsort(stable=True)[:num_clusters]
        centroids_MD = _recentred(unit_ND, assignments_N, centroids_MD, spare_MD=unit_ND[worst_M])
    return Clustering(centroids_MD, _nearest(unit_ND, centroids_MD)[1])


def _nearest(unit_ND: Tensor, centroids_MD: Tensor) -> tuple[Tensor, Tensor]:
    """Return each sample's largest cosine and the index of that centroid.

    Computes some rows at a time: with N/25 clusters, all cosines at once would be N^2/25 numbers.
    """
    rows = max(1, _MOST_COSINES // len(centroids_MD))
    found = [(part_ND @ centroids_MD.T).max(dim=1) for part_ND in torch.split(unit_ND, rows)]
    return torch.cat([part.values for part in found]), torch.cat([part.indices for part in found])


def balanced_kmeans(
    embeddings_ND: Tensor,
    num_clusters: int,
    *,
    generator: torch.Generator,
    num_iterations: int = 5,
    sharpness: float = 25.0,
    sinkhorn_iterations: int = 10,
) -> Clustering:
    """Run k-means by cosine with clusters of nearly equal size, starting from randomly chosen samples.

        s_i = argmax_m sinkhorn_assignment(cos(z, c))_im,   c_m = n(sum_{i: s_i = m} n(z_i))

    A cluster without members starts again at a random sample.

    Args:
        embeddings_ND: N >= num_clusters embeddings: the client's memory of projections.
        num_clusters: M, the number of the client's local centroids.
        generator: draws the samples to start from.
        num_iterations: the number of updates of the centroids.
        sharpness, sinkhorn_iterations: passed to `sinkhorn_assignment`.

    Returns:
        The centroids, which are all that leaves the client, and the assignments to them.

    Raises:
        AggregationError: there are fewer samples than clusters.

    Example:
        >>> import torch
        >>> z = torch.tensor([[1.0, 0.0], [1.0, 0.1], [1.0, 0.2], [0.9, 1.0]])
        >>> sizes = balanced_kmeans(z, 2, generator=torch.Generator().manual_seed(0)).assignments.bincount()
        >>> sizes.tolist()
        [2, 2]

    Reference: Orchestra (Lubana et al. 2022), the local clustering after training.
    """
    unit_ND = _checked_units(embeddings_ND, num_clusters)

    def assigned(centroids_MD: Tensor) -> Tensor:
        scores_NM = unit_ND @ centroids_MD.T
        return sinkhorn_assignment(scores_NM, sharpness, sinkhorn_iterations).argmax(dim=1)

    centroids_MD = unit_ND[_distinct(len(unit_ND), num_clusters, generator, unit_ND.device)]
    for _ in range(num_iterations):
        spare_MD = unit_ND[_distinct(len(unit_ND), num_clusters, generator, unit_ND.device)]
        centroids_MD = _recentred(unit_ND, assigned(centroids_MD), centroids_MD, spare_MD)
    return Clustering(centroids_MD, assigned(centroids_MD))


def sinkhorn_assignment(
    scores_NM: Tensor, sharpness: float = 25.0, num_iterations: int = 100, tolerance: float = 1e-2
) -> Tensor:
    """Return soft assignments to clusters of equal size, by Sinkhorn's alternating normalisation.

        A = diag(r) softmax(sharpness * scores) diag(c)   with rows that sum to 1 and columns that sum to N/M

    The rows are normalised last, so they sum to 1; the columns sum to N/M as nearly as the iterations allow. Every
    tenth iteration it checks whether the row factors have changed by less than the tolerance in all, and stops if so.
    There is no gradient.

    Args:
        scores_NM: similarities of N samples to M centroids.
        sharpness: lambda.
        num_iterations: the largest number of iterations.
        tolerance: the sum over the samples of the relative change of their factors.

    Returns:
        A_NM in the scores' dtype (float32 at least); computed in float64.

    Example:
        >>> import torch
        >>> scores = torch.tensor([[1.0, 0.0], [0.9, 0.0], [0.8, 0.0], [0.1, 0.0]])  # all prefer the first
        >>> sinkhorn_assignment(scores).argmax(dim=1).tolist()
        [0, 0, 1, 1]

    Reference: Orchestra (Lubana et al. 2022), after Cuturi (2013); the number of iterations and the stopping rule are
    those of its code.
    """
    if scores_NM.ndim != 2 or 0 in scores_NM.shape:
        raise AggregationError(f"scores_NM must be a matrix with rows and columns, not {tuple(scores_NM.shape)}")
    num_samples, num_clusters = scores_NM.shape
    dtype = torch.promote_types(torch.float32, scores_NM.dtype)
    smallest = torch.finfo(torch.float64).tiny
    with torch.no_grad():
        plan_NM = F.softmax(scores_NM.double() * sharpness, dim=1)
        row_N = plan_NM.new_full((num_samples,), 1 / num_samples)
        column_M = plan_NM.new_full((num_clusters,), 1 / num_clusters)
        for iteration in range(num_iterations):
            column_M = 1 / num_clusters / (row_N @ plan_NM).clamp_min(smallest)
            new_N = 1 / num_samples / (plan_NM @ column_M).clamp_min(smallest)
            settled = iteration % 10 == 0 and float((row_N / new_N - 1).abs().sum()) < tolerance
            row_N = new_N
            if settled:
                break
        return (plan_NM * row_N[:, None] * column_M * num_samples).to(dtype)


def global_centroids(
    local_ND: Tensor,
    num_clusters: int,
    *,
    generator: torch.Generator,
    initial_MD: Tensor | None = None,
    num_steps: int = 500,
    temperature: float = 0.1,
    learning_rate: float = 0.01,
    momentum: float = 0.9,
    weight_decay: float = 1e-4,
) -> Tensor:
    """Cluster all clients' local centroids into global ones of equal size, by gradient descent.

        minimise  -mean_i cos( sinkhorn_assignment(Z C^T)_i , softmax(Z C^T / t)_i )   over C,   Z = n(local)

    with C scaled back to unit length after each step of SGD with momentum. The Sinkhorn assignments are targets and
    get no gradient.

    Args:
        local_ND: the local centroids of all clients, concatenated.
        num_clusters: M.
        generator: draws the centroids to start from if none are given.
        initial_MD: the previous round's global centroids.
        num_steps: 500 in Orchestra's code, 50 in FedU2's.
        temperature: t.
        learning_rate, momentum, weight_decay: of SGD.

    Returns:
        C_MD, of unit length.

    Raises:
        AggregationError: there are no local centroids, or the initial ones have another shape.

    Example:
        >>> import torch
        >>> z = torch.tensor([[1.0, 0.0], [1.0, 0.1], [0.0, 1.0], [0.1, 1.0]])
        >>> c = global_centroids(z, 2, generator=torch.Generator().manual_seed(0))
        >>> s = (z @ c.T).argmax(dim=1)
        >>> bool(s[0] == s[1] != s[2] == s[3])
        True

    Reference: Orchestra (Lubana et al. 2022), the global clustering. Deviation: random centroids to start from are of
    unit length; the authors' code takes a linear layer's initial weights.
    """
    unit_ND = _checked_units(local_ND, num_clusters=1)
    shape = (num_clusters, unit_ND.shape[1])
    if initial_MD is None:
        drawn_MD = torch.randn(shape, generator=generator, device=generator.device, dtype=unit_ND.dtype)
        centroids_MD = F.normalize(drawn_MD.to(unit_ND.device))
    elif tuple(initial_MD.shape) == shape:
        centroids_MD = F.normalize(initial_MD.detach().to(unit_ND))
    else:
        raise AggregationError(f"initial_MD must be of shape {shape}, not {tuple(initial_MD.shape)}")
    velocity_MD = torch.zeros_like(centroids_MD)
    for _ in range(num_steps):
        with torch.enable_grad():
            centroids_MD.requires_grad_()
            scores_NM = unit_ND @ centroids_MD.T
            predicted_NM = F.softmax(scores_NM / temperature, dim=1)
            loss = -F.cosine_similarity(sinkhorn_assignment(scores_NM), predicted_NM, dim=1).mean()
            (gradient_MD,) = torch.autograd.grad(loss, centroids_MD)
        centroids_MD = centroids_MD.detach()
        velocity_MD = momentum * velocity_MD + gradient_MD + weight_decay * centroids_MD
        centroids_MD = F.normalize(centroids_MD - learning_rate * velocity_MD)
    return centroids_MD


def _checked_units(embeddings_ND: Tensor, num_clusters: int) -> Tensor:
    """Return unit vectors in at least float32. Raises AggregationError if there are fewer of them than clusters."""
    if embeddings_ND.ndim != 2 or 0 in embeddings_ND.shape:
        raise AggregationError(f"embeddings must be a matrix with rows and columns, not {tuple(embeddings_ND.shape)}")
    if not 1 <= num_clusters <= len(embeddings_ND):
        raise AggregationError(f"there are {len(embeddings_ND)} samples for {num_clusters} clusters")
    return directions(embeddings_ND.to(torch.promote_types(torch.float32, embeddings_ND.dtype)))


def _distinct(population: int, size: int, generator: torch.Generator, device: torch.device) -> Tensor:
    """Draw `size` distinct indices."""
    return torch.randperm(population, generator=generator, device=generator.device)[:size].to(device)


def _recentred(unit_ND: Tensor, assignments_N: Tensor, centroids_MD: Tensor, spare_MD: Tensor) -> Tensor:
    """Return the directions of the sums of the members of each cluster.

    An empty cluster takes the next spare; a cluster whose members cancel keeps its centroid.
    """
    sum_MD = group_sums(unit_ND, assignments_N, len(centroids_MD))
    empty_M = assignments_N.bincount(minlength=len(centroids_MD)) == 0
    sum_MD[empty_M] = spare_MD[: int(empty_M.sum())]
    cancelled_M1 = torch.linalg.vector_norm(sum_MD, dim=1, keepdim=True) < 1e-6
    return torch.where(cancelled_M1, centroids_MD, F.normalize(sum_MD))
