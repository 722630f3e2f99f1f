"""Distillation by softmax: SSD's projector distillation and FLESD's similarity distillation."""

from typing import Literal

from torch import Tensor
from torch.nn import functional as F

from fedssl.losses._embeddings import check_batch, check_positive, check_variant, check_width, full_precision
from fedssl.unit_vectors import unit


def projector_distillation(
    h_BD: Tensor,
    z_BD: Tensor,
    temperature: float = 0.5,
    variant: Literal["reference", "paper", "mse"] = "reference",
) -> Tensor:
    """Return the divergence between representations and the embeddings that the projector computes from them.

        reference: L = mean_i KL(softmax(z_i / t) || softmax(h_i / t))     (no factor t^2)
        paper:     L = mean_i KL(softmax(h_i) || softmax(z_i))             (t is 1, the argument is ignored)
        mse:       L = mean over all entries of (h - z)^2                  (t unused)

    h and z are used as they are, un-normalised. Gradients flow into both.

    Args:
        h_BD: representations; their width H must be the embeddings' width D.
        z_BD: the embeddings of the same samples.
        temperature: t of the reference variant.
        variant: "reference" by default, because the published numbers come from the authors' code.

    Returns:
        The mean over the batch; the method averages it over the views.

    Example:
        >>> import torch
        >>> h, z = torch.tensor([[0.0, 0.0]]), torch.tensor([[1.0, 0.0]])
        >>> [round(float(projector_distillation(h, z, variant=v)), 4) for v in ("reference", "paper", "mse")]
        [0.3278, 0.1201, 0.5]

    Reference: SSD Eq. 9 and Table 5 (MSE). Deviation of the default from Eq. 9: the direction is reversed and t is 0.5,
    as in the authors' code.
    """
    check_batch(h_BD=h_BD, z_BD=z_BD)
    check_positive(temperature=temperature)
    check_variant(variant, ("reference", "paper", "mse"))
    with full_precision(h_BD, z_BD) as (h_BD, z_BD):
        if variant == "mse":
            return F.mse_loss(h_BD, z_BD)
        if variant == "paper":
            log_p_BD, log_q_BD = F.log_softmax(h_BD, dim=1), F.log_softmax(z_BD, dim=1)
        else:
            log_p_BD, log_q_BD = F.log_softmax(z_BD / temperature, dim=1), F.log_softmax(h_BD / temperature, dim=1)
        return F.kl_div(log_q_BD, log_p_BD, reduction="batchmean", log_target=True)


def similarity_distillation(
    student_BD: Tensor,
    keys_MD: Tensor,
    target_BM: Tensor,
    temperature: float = 0.1,
    variant: Literal["reference", "paper"] = "reference",
) -> Tensor:
    """Pull a student's softmax over a queue of keys to given target rows.

        q_ij = exp(cos(s_i, k_j) / t) / sum_u exp(cos(s_i, k_u) / t)
        reference: L = mean_i -sum_j p_ij log q_ij        (cross entropy)
        paper:     L = mean_i KL(p_i || q_i)

    The two differ by the entropy of the target, which has no gradient. The gradient flows into the student only:
    the keys come from its moving average, the target from the clients.

    Args:
        student_BD: the student's embeddings of B samples.
        keys_MD: the anchors' embeddings (the queue).
        target_BM: p, rows that sum to 1 (`fedssl.aggregation.ensemble_similarity`).
        temperature: t of the student; FLESD uses the target's.
        variant: "reference" by default, so that losses compare with those of the authors' code.

    Returns:
        The mean over the batch.

    Example:
        >>> import torch
        >>> student, keys, target = torch.tensor([[2.0, 0.0]]), torch.eye(2), torch.tensor([[1.0, 0.0]])
        >>> round(float(similarity_distillation(student, keys, target, temperature=1.0)), 4)  # log(1 + 1/e)
        0.3133

    Reference: FLESD Eq. 7 and 9.
    """
    check_width(student_BD=student_BD, keys_MD=keys_MD)
    if target_BM.shape != (len(student_BD), len(keys_MD)):
        shapes = tuple(target_BM.shape), len(student_BD), len(keys_MD)
        raise ValueError(f"target_BM of shape {shapes[0]} does not fit {shapes[1]} samples and {shapes[2]} keys")
    check_positive(temperature=temperature)
    check_variant(variant, ("reference", "paper"))
    with full_precision(student_BD, keys_MD.detach(), target_BM.detach()) as (student_BD, keys_MD, target_BM):
        logits_BM = unit(student_BD) @ unit(keys_MD).T / temperature
        if variant == "paper":
            return F.kl_div(F.log_softmax(logits_BM, dim=1), target_BM, reduction="batchmean")
        return F.cross_entropy(logits_BM, target_BM)
