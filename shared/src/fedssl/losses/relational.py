"""FedX's relational loss: two views should be equally similar to the same references."""

import math
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from fedssl.losses._embeddings import check_batch, check_positive, check_variant, check_width, full_precision
from fedssl.unit_vectors import unit


def relational_divergence(
    a_BD: Tensor,
    b_BD: Tensor,
    references_RD: Tensor,
    temperature: float,
    variant: Literal["reference", "paper"] = "reference",
) -> Tensor:
    """Return the divergence between two views' softmax similarities to a set of references.

        r(a)_j = exp(cos(a, A_j) / t) / sum_k exp(cos(a, A_k) / t),   m = (r(a) + r(b)) / 2
        reference: L = mean_i [KL(m || r(a)) + KL(m || r(b))] / 2
        paper:     L = mean_i [KL(r(a) || m) + KL(r(b) || m)] / 2     (the Jensen-Shannon divergence)

    Gradients flow into both views, into the references and through m. Both variants are 0 if the views coincide.

    Args:
        a_BD, b_BD: two views of B samples: projections for the local loss, predictions for the global one.
        references_RD: R random samples of the client: their projections, or the teacher's.
        temperature: t.
        variant: "reference" by default, because the published numbers come from the authors' code.

    Returns:
        The mean over the batch.

    Example:
        >>> import torch
        >>> a, b, references = torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 1.0]]), torch.eye(2)
        >>> round(float(relational_divergence(a, b, references, temperature=1.0)), 4)
        0.1201
        >>> round(float(relational_divergence(a, b, references, temperature=1.0, variant="paper")), 4)
        0.1109

    Reference: FedX Eq. 6-7 (local) and 10-11 (global). Deviation of the default from Eq. 7 and 11: the direction of the
    two divergences is reversed, as in the authors' code.
    """
    check_batch(a_BD=a_BD, b_BD=b_BD)
    check_width(a_BD=a_BD, references_RD=references_RD)
    check_positive(temperature=temperature)
    check_variant(variant, ("reference", "paper"))
    with full_precision(a_BD, b_BD, references_RD) as tensors:
        a_BD, b_BD, references_RD = (unit(tensor) for tensor in tensors)
        log_a_BR = F.log_softmax(a_BD @ references_RD.T / temperature, dim=1)
        log_b_BR = F.log_softmax(b_BD @ references_RD.T / temperature, dim=1)
        log_m_BR = torch.logaddexp(log_a_BR, log_b_BR) - math.log(2)
        if variant == "reference":
            pairs = [(log_m_BR, log_a_BR), (log_m_BR, log_b_BR)]
        else:
            pairs = [(log_a_BR, log_m_BR), (log_b_BR, log_m_BR)]
        divergences = [F.kl_div(log_q, log_p, reduction="batchmean", log_target=True) for log_p, log_q in pairs]
        return (divergences[0] + divergences[1]) / 2
