"""Losses over soft cluster assignments: FedRLC's crossed divergence and Orchestra's prediction of assignments."""

import torch
from torch import Tensor
from torch.nn import functional as F

from fedssl.losses._embeddings import check_batch, check_positive, check_width, full_precision
from fedssl.unit_vectors import unit


def student_t_assignment(z_BD: Tensor, centers_MD: Tensor, exponent: float = -0.5) -> Tensor:
    """Return soft assignments to centers, by a heavy-tailed kernel of the squared distance.

        q_im = (1 + ||z_i - mu_m||^2)^e / sum_n (1 + ||z_i - mu_n||^2)^e

    Embeddings and centers are used as they are. Gradients flow into both.

    Args:
        z_BD: embeddings.
        centers_MD: mu.
        exponent: e, negative. The default -0.5 is FedRLC's, as printed; DEC's Student t with one degree of freedom
            has -1. The order of the centers is the same for every e.

    Returns:
        q_BM, positive rows that sum to 1.

    Example:
        >>> import torch
        >>> centers = torch.tensor([[0.0, 0.0], [3.0**0.5, 0.0]])
        >>> [round(q, 4) for q in student_t_assignment(torch.zeros(1, 2), centers)[0].tolist()]  # 1 to 1/2
        [0.6667, 0.3333]

    Reference: FedRLC Eq. 4-5.
    """
    check_width(z_BD=z_BD, centers_MD=centers_MD)
    if not exponent < 0:
        raise ValueError(f"exponent must be negative, not {exponent}")
    with full_precision(z_BD, centers_MD) as (z_BD, centers_MD):
        # Distances do not depend on the origin; one in the middle of the centers keeps the cancellation small.
        origin_D = centers_MD.detach().mean(dim=0)
        z_BD, centers_MD = z_BD - origin_D, centers_MD - origin_D
        length_B1, length_M = z_BD.square().sum(dim=1, keepdim=True), centers_MD.square().sum(dim=1)
        distance_BM = (length_B1 + length_M - 2 * z_BD @ centers_MD.T).clamp_min(0)
        return F.softmax(exponent * distance_BM.log1p(), dim=1)


def target_distribution(q_BM: Tensor) -> Tensor:
    """Return sharpened assignments, balanced by how often each cluster is chosen in the batch.

        p_im = (q_im^2 / sum_j q_jm) / sum_n (q_in^2 / sum_j q_jn)

    No gradient flows through it.

    Args:
        q_BM: soft assignments, rows that sum to 1.

    Returns:
        p_BM, rows that sum to 1.

    Example:
        >>> import torch
        >>> q = torch.tensor([[0.75, 0.25], [0.75, 0.25]])
        >>> target_distribution(q)[0].tolist()  # 0.75^2/1.5 to 0.25^2/0.5
        [0.75, 0.25]

    Reference: FedRLC Eq. 6, with q^{alpha,T} where it prints q^{a,T} and the sums over i taken over the batch.
    """
    check_width(q_BM=q_BM)
    with full_precision(q_BM.detach()) as (q_BM,):
        smallest = torch.finfo(q_BM.dtype).tiny
        weight_BM = q_BM * (q_BM / q_BM.sum(dim=0).clamp_min(smallest))
        return weight_BM / weight_BM.sum(dim=1, keepdim=True).clamp_min(smallest)


def assignment_divergence(p_BM: Tensor, q_BM: Tensor) -> Tensor:
    """Return the mean divergence between two sets of soft assignments.

        L = mean_i KL(p_i || q_i)

    Gradients flow into both. FedRLC mixes centers with a weight that is the divergence of the global assignments from
    the local ones.

    Args:
        p_BM, q_BM: soft assignments of the same samples, rows that sum to 1.

    Returns:
        The mean over the rows.

    Example:
        >>> import torch
        >>> round(float(assignment_divergence(torch.tensor([[1.0, 0.0]]), torch.tensor([[0.5, 0.5]]))), 4)  # log 2
        0.6931

    Reference: FedRLC Eq. 11.
    """
    check_batch(p_BM=p_BM, q_BM=q_BM)
    with full_precision(p_BM, q_BM) as (p_BM, q_BM):
        return _kl_rows(p_BM, q_BM).mean()


def crossed_kl(q_online_a: Tensor, q_online_b: Tensor, q_target_a: Tensor, q_target_b: Tensor) -> Tensor:
    """Pull each view's online assignments to the other view's target distribution if their hard labels agree.

        L = 1/B sum_i [argmax qT(b)_i = argmax qO(a)_i] KL(pT(b)_i || qO(a)_i)  +  the same with a and b swapped

    with pT = target_distribution(qT). Samples whose labels disagree count as 0 in the mean over B; the smaller index
    wins a tie. The gradient flows into the online assignments only, and through them into the centers.

    Args:
        q_online_a, q_online_b: (B, M) assignments of the two views by the online network.
        q_target_a, q_target_b: (B, M) assignments by the target network.

    Returns:
        The sum of both directions, averaged over the batch.

    Example:
        >>> import torch
        >>> online, target = torch.tensor([[0.5, 0.5]]), torch.tensor([[1.0, 0.0]])
        >>> round(float(crossed_kl(online, online, target, target)), 4)  # 2 log 2
        1.3863

    Reference: FedRLC Eq. 6 and 8.
    """
    check_batch(q_online_a=q_online_a, q_online_b=q_online_b, q_target_a=q_target_a, q_target_b=q_target_b)
    with full_precision(q_online_a, q_online_b, q_target_a.detach(), q_target_b.detach()) as tensors:
        online_a_BM, online_b_BM, target_a_BM, target_b_BM = tensors
        crossed = [(target_b_BM, online_a_BM), (target_a_BM, online_b_BM)]
        kept = [
            _kl_rows(target_distribution(target_BM), online_BM) * (target_BM.argmax(dim=1) == online_BM.argmax(dim=1))
            for target_BM, online_BM in crossed
        ]
        return (kept[0] + kept[1]).mean()


def cluster_assignment(online_BD: Tensor, target_BD: Tensor, centroids_MD: Tensor, temperature: float = 0.1) -> Tensor:
    """Predict from one view the global centroids to which the target network assigns the other view.

        L = mean_i -sum_m softmax(n(tz_i) C^T / t)_m log softmax(n(z_i) C^T / t)_m

    The gradient flows into the online embeddings only: the target network follows by moving average and the
    centroids are frozen on the client.

    Args:
        online_BD: the online network's embeddings of the second view.
        target_BD: the target network's embeddings of the first.
        centroids_MD: C, used as given (the server keeps them at unit length).
        temperature: t.

    Returns:
        The mean over the batch.

    Example:
        >>> import torch
        >>> z, centroids = torch.tensor([[2.0, 0.0]]), torch.tensor([[0.0, 1.0], [0.0, -1.0]])
        >>> round(float(cluster_assignment(z, z, centroids)), 4)  # no preference: log 2
        0.6931

    Reference: Orchestra (Lubana et al. 2022), the clustering term; one direction only, as in the authors' code.
    """
    check_batch(online_BD=online_BD, target_BD=target_BD)
    check_width(online_BD=online_BD, centroids_MD=centroids_MD)
    check_positive(temperature=temperature)
    with full_precision(online_BD, target_BD.detach(), centroids_MD.detach()) as (online_BD, target_BD, centroids_MD):
        target_BM = F.softmax(unit(target_BD) @ centroids_MD.T / temperature, dim=1)
        return F.cross_entropy(unit(online_BD) @ centroids_MD.T / temperature, target_BM)


def _kl_rows(p_BM: Tensor, q_BM: Tensor) -> Tensor:
    """Return the KL divergence of each row.

    Zeros count as the smallest positive number, so that neither values nor gradients are NaN.
    """
    smallest = torch.finfo(q_BM.dtype).tiny
    return (p_BM * (p_BM.clamp_min(smallest).log() - q_BM.clamp_min(smallest).log())).sum(dim=1)
