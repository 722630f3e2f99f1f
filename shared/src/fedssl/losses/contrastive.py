"""Contrastive losses: find one positive among many samples, by cross entropy over cosines."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from fedssl.losses._embeddings import check_batch, check_positive, check_width, full_precision
from fedssl.unit_vectors import unit


def nt_xent(z1_BD: Tensor, z2_BD: Tensor, temperature: float) -> Tensor:
    """Return the normalised temperature-scaled cross entropy over both views of a batch.

    With z the 2B rows of both views and i+ the other view of i,

        L = mean_i -log[ exp(cos(z_i, z_i+) / t) / sum_{k != i} exp(cos(z_i, z_k) / t) ]

    Both views are anchors. The denominator leaves out the anchor itself and includes the positive. Gradients flow into
    both views; FedX's global term passes a teacher's output, which has none. The loss of a batch of 1 is 0, because
    there are no negatives.

    Args:
        z1_BD, z2_BD: two views of B samples.
        temperature: t.

    Returns:
        The mean over the 2B anchors.

    Example:
        >>> import torch
        >>> z = torch.eye(2)
        >>> round(float(nt_xent(z, z, temperature=1.0)), 4)  # log(1 + 2/e)
        0.5514

    Reference: SimCLR (Chen et al. 2020); FedX Eq. 2 and, on (prediction, teacher), Eq. 9 as in the authors' code. For
    Eq. 9 as printed see :func:`cross_model_contrast`.
    """
    check_batch(z1_BD=z1_BD, z2_BD=z2_BD)
    check_positive(temperature=temperature)
    with full_precision(z1_BD, z2_BD) as views:
        z_AD = unit(torch.cat(views))
        num_anchors = len(z_AD)
        itself_AA = torch.eye(num_anchors, dtype=torch.bool, device=z_AD.device)
        logits_AA = (z_AD @ z_AD.T / temperature).masked_fill(itself_AA, -torch.inf)
        positive_A = torch.arange(num_anchors, device=z_AD.device).roll(num_anchors // 2)
        return F.cross_entropy(logits_AA, positive_A)


def multi_crop_nt_xent(z_VBD: Sequence[Tensor], temperature: float) -> Tensor:
    """Return SimCLR's loss over V views or crops of each sample of a batch.

    With z_i one of the V B rows, P_i the V - 1 other rows of its sample, and Q_i all rows of other samples,

        L = mean_i mean_{p in P_i} -log[ e_ip / (e_ip + sum_{q in Q_i} e_iq) ],    e_ip = exp(cos(z_i, p) / t)

    For V = 2 it is :func:`nt_xent`. Gradients flow into all rows. The loss of a batch of 1 is 0, because there are no
    negatives.

    Args:
        z_VBD: V views or crops of B samples, V at least 2.
        temperature: t.

    Returns:
        The mean over the V B anchors and their V - 1 positives.

    Example:
        >>> import torch
        >>> z = torch.eye(2)
        >>> round(float(multi_crop_nt_xent([z, z, z], temperature=1.0)), 4)  # log(1 + 3/e)
        0.7437

    Reference: SwAV (Caron et al. 2020), Appendix A.8, Eq. 7.
    """
    if (num_views := len(z_VBD)) < 2:
        raise ValueError(f"this loss is undefined for fewer than 2 views: {num_views}")
    check_batch(1, **{f"z{number}_BD": z_BD for number, z_BD in enumerate(z_VBD, 1)})
    check_positive(temperature=temperature)
    with full_precision(*z_VBD) as tensors:
        z_AD, batch_size = unit(torch.cat(tensors)), len(tensors[0])
        if batch_size == 1:
            return 0.0 * z_AD.sum()
        logits_AA = z_AD @ z_AD.T / temperature
        own_AA = torch.eye(batch_size, dtype=torch.bool, device=z_AD.device).repeat(num_views, num_views)
        negatives_V1B = logits_AA.masked_fill(own_AA, -torch.inf).logsumexp(dim=1).view(num_views, 1, batch_size)
        # The logits of each two views of one sample; those of a view and itself are not pairs.
        positive_VVB = logits_AA.view(num_views, batch_size, num_views, batch_size).diagonal(dim1=1, dim2=3)
        losses_VVB = torch.logaddexp(positive_VVB, negatives_V1B) - positive_VVB
        pairs_VV1 = 1.0 - torch.eye(num_views, dtype=z_AD.dtype, device=z_AD.device)[:, :, None]
        return (losses_VVB * pairs_VV1).sum() / (num_views * (num_views - 1) * batch_size)


def cross_model_contrast(local_BD: Tensor, global_BD: Tensor, temperature: float) -> Tensor:
    """Contrast each sample's local prediction with the global model's embedding of its other view.

    With p the local predictions of one view and g the global model's embeddings of the other,

        L = mean_i -log[ exp(cos(p_i, g_i) / t) / sum_{k != i} (exp(cos(p_i, p_k) / t) + exp(cos(p_i, g_k) / t)) ]

    Only the p are anchors. Neither the anchor nor its positive is in the denominator, so the loss can be negative.
    Gradients flow into both arguments; the global model's output has none. The loss of a batch of 1 is 0, because there
    are no negatives.

    Args:
        local_BD, global_BD: B samples, in the same order.
        temperature: t.

    Returns:
        The mean over the B anchors.

    Example:
        >>> import torch
        >>> z = torch.eye(2)
        >>> round(float(cross_model_contrast(z, z, temperature=1.0)), 4)  # log(2) - 1
        -0.3069

    Reference: FedX (Han et al. 2022), Eq. 9 as printed. Its authors' code computes :func:`nt_xent` instead.
    """
    check_batch(local_BD=local_BD, global_BD=global_BD)
    check_positive(temperature=temperature)
    with full_precision(local_BD, global_BD) as tensors:
        p_BD, g_BD = (unit(tensor) for tensor in tensors)
        if len(p_BD) == 1:
            return 0.0 * (p_BD * g_BD).sum()
        own_BB = torch.eye(len(p_BD), dtype=torch.bool, device=p_BD.device)
        positive_B = (p_BD * g_BD).sum(dim=1) / temperature
        negatives = [(p_BD @ k_BD.T / temperature).masked_fill(own_BB, -torch.inf) for k_BD in (p_BD, g_BD)]
        return (torch.logsumexp(torch.cat(negatives, dim=1), dim=1) - positive_B).mean()


def info_nce(query_BD: Tensor, key_BD: Tensor, queue_QD: Tensor, temperature: float) -> Tensor:
    """Contrast each query's own key with a queue of other keys.

        L = mean_i -log[ exp(cos(q_i, k_i) / t) / (exp(cos(q_i, k_i) / t) + sum_u exp(cos(q_i, u) / t)) ]

    The gradient flows into the queries only: keys come from the momentum encoder and the queue from earlier batches.

    Args:
        query_BD, key_BD: B queries and, in the same order, their keys.
        queue_QD: the negatives.
        temperature: t.

    Returns:
        The mean over the B queries.

    Example:
        >>> import torch
        >>> query, queue = torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 1.0]])
        >>> round(float(info_nce(query, query, queue, temperature=1.0)), 4)  # log(1 + 1/e)
        0.3133

    Reference: MoCo (He et al. 2020), Eq. 1; the methods sum it over the two orders of the views.
    """
    check_batch(query_BD=query_BD, key_BD=key_BD)
    check_width(query_BD=query_BD, queue_QD=queue_QD)
    check_positive(temperature=temperature)
    with full_precision(query_BD, key_BD.detach(), queue_QD.detach()) as tensors:
        query_BD, key_BD, queue_QD = (unit(tensor) for tensor in tensors)
        positive_B1 = (query_BD * key_BD).sum(dim=1, keepdim=True)
        logits_BQ = torch.cat([positive_B1, query_BD @ queue_QD.T], dim=1) / temperature
        return F.cross_entropy(logits_BQ, torch.zeros(len(query_BD), dtype=torch.long, device=query_BD.device))


def cross_view_info_nce(z1_BD: Tensor, z2_BD: Tensor, temperature: float) -> Tensor:
    """Contrast each sample of one view with all samples of the other.

        L = mean_i -log[ exp(cos(z1_i, z2_i) / t) / sum_j exp(cos(z1_i, z2_j) / t) ]

    Only one direction: the anchors come from z1, the positive and the B-1 negatives from z2. Gradients flow into both.
    The loss of a batch of 1 is 0, because there are no negatives.

    Args:
        z1_BD, z2_BD: two views of B samples.
        temperature: t.

    Returns:
        The mean over the B anchors.

    Example:
        >>> import torch
        >>> z = torch.eye(2)
        >>> round(float(cross_view_info_nce(z, z, temperature=1.0)), 4)  # log(1 + 1/e)
        0.3133

    Reference: FLESD Eq. 3, as in its authors' code, which takes negatives from the other view only.
    """
    check_batch(z1_BD=z1_BD, z2_BD=z2_BD)
    check_positive(temperature=temperature)
    with full_precision(z1_BD, z2_BD) as (z1_BD, z2_BD):
        logits_BB = unit(z1_BD) @ unit(z2_BD).T / temperature
        return F.cross_entropy(logits_BB, torch.arange(len(z1_BD), device=z1_BD.device))
