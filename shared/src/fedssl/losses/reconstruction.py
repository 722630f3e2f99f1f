"""Masked reconstruction: the pixels of hidden patches are predicted from the visible ones."""

from torch import Tensor

from fedssl.losses._embeddings import full_precision

# Added to a patch's variance before taking its root; the authors' value.
EPSILON = 1e-6


def masked_reconstruction(
    prediction_BNP: Tensor,
    patches_BNP: Tensor,
    mask_BN: Tensor,
    normalize: bool = True,  # noqa: FBT001, FBT002 (the public signature)
) -> Tensor:
    """Return the mean squared error of the predicted pixels of the masked patches.

        y_n = (x_n - mean(x_n)) / sqrt(var(x_n) + 1e-6)      (or x_n without `normalize`; var is unbiased)
        L = sum_{i, n} m_in mean_p (y'_inp - sg(y_inp))^2 / sum_{i, n} m_in

    The gradient flows into the prediction only. The loss is 0 if nothing is masked.

    Args:
        prediction_BNP: y', the predicted pixels of N patches of P values (channels included).
        patches_BNP: x, the pixels of the image itself.
        mask_BN: m, 1 for a masked patch and 0 for a visible one; boolean or a number.
        normalize: whether each patch's pixels are standardised first, which needs P >= 2.

    Returns:
        The mean over all masked patches of the batch.

    Example:
        >>> import torch
        >>> x, mask = torch.tensor([[[1.0, 3.0], [9.0, 9.0]]]), torch.tensor([[1, 0]])
        >>> round(float(masked_reconstruction(torch.zeros(1, 2, 2), x, mask)), 4)  # standardised: -1/sqrt 2, 1/sqrt 2
        0.5
        >>> float(masked_reconstruction(torch.zeros(1, 2, 2), x, mask, normalize=False))  # (1 + 9) / 2
        5.0

    Reference: MAE (He et al. 2022), Section 3 and Table 1d (normalised pixels), as in the authors' code.
    """
    shape = tuple(prediction_BNP.shape)
    if len(shape) != 3 or 0 in shape:
        raise ValueError(f"prediction_BNP must have images, patches and pixels, but has shape {shape}")
    if tuple(patches_BNP.shape) != shape or tuple(mask_BN.shape) != shape[:2]:
        shapes = tuple(patches_BNP.shape), tuple(mask_BN.shape)
        raise ValueError(f"patches_BNP {shapes[0]} and mask_BN {shapes[1]} do not fit prediction_BNP {shape}")
    if normalize and shape[2] < 2:
        raise ValueError("a patch of one value has no variance: set normalize to False")
    with full_precision(prediction_BNP, patches_BNP.detach(), mask_BN.detach()) as (predicted, target, mask):
        if normalize:
            centred = target - target.mean(dim=2, keepdim=True)
            variance = centred.square().sum(dim=2, keepdim=True) / (shape[2] - 1)
            target = centred * (variance + EPSILON).rsqrt()
        error_BN = (predicted - target).square().mean(dim=2)
        return (error_BN * mask).sum() / mask.sum().clamp_min(1)
