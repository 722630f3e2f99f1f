"""Predictive losses: a prediction regresses a target that gets no gradient."""

from torch import Tensor

from fedssl.losses._embeddings import check_batch, full_precision
from fedssl.unit_vectors import unit


def byol_regression(prediction_BD: Tensor, target_BD: Tensor) -> Tensor:
    """Return the squared distance between the unit vectors of a prediction and its target.

        L = mean_i || n(p_i) - n(sg(t_i)) ||^2 = mean_i (2 - 2 cos(p_i, sg(t_i)))

    The gradient flows into the prediction only.

    Args:
        prediction_BD: the predictor's output on one view.
        target_BD: the target network's output on the other.

    Returns:
        The mean over the batch, between 0 and 4; the methods add the two orders of the views.

    Example:
        >>> import torch
        >>> float(byol_regression(torch.tensor([[3.0, 0.0]]), torch.tensor([[0.0, 2.0]])))
        2.0

    Reference: BYOL (Grill et al. 2020), Eq. 2; FedX Eq. 4; FedU Eq. 1.
    """
    return 2 + 2 * negative_cosine(prediction_BD, target_BD)


def negative_cosine(prediction_BD: Tensor, target_BD: Tensor) -> Tensor:
    """Return the negative cosine between a prediction and its target.

        L = mean_i -cos(p_i, sg(z_i))

    The gradient flows into the prediction only.

    Args:
        prediction_BD: the predictor's output on one view.
        target_BD: the projector's output on the other.

    Returns:
        The mean over the batch, between -1 and 1; SimSiam takes half the sum of the two orders of the views.

    Example:
        >>> import torch
        >>> float(negative_cosine(torch.tensor([[3.0, 0.0]]), torch.tensor([[2.0, 0.0]])))
        -1.0

    Reference: SimSiam (Chen and He 2021), Eq. 1.
    """
    check_batch(prediction_BD=prediction_BD, target_BD=target_BD)
    with full_precision(prediction_BD, target_BD.detach()) as (prediction_BD, target_BD):
        return -(unit(prediction_BD) * unit(target_BD)).sum(dim=1).mean()
