"""Regularisers that can be added to any objective: decorrelation of features, proximity of weights."""

import math
from collections.abc import Iterable, Mapping
from typing import Literal

import torch
from torch import Tensor

from fedssl.losses._embeddings import check_variant, check_width, full_precision

# Added to a variance before taking its root; the authors' value.
EPSILON = 1e-8


def decorrelation(z_BD: Tensor, variant: Literal["reference", "paper"] = "reference") -> Tensor:
    """Return a penalty on the correlation between features, against dimensional collapse.

    With x the features standardised over the batch,

        reference: L = 1/B mean_{m != n} (x^T x)_mn^2     (x by the unbiased variance, plus 1e-8)
        paper:     L = 1/D^2 ||K||_F^2                    (K the correlation matrix, diagonal included)

    x^T x is not divided by B, so the reference is about B times the paper's value. Gradients also flow through the
    mean and the variance. The penalty of a batch of 1, which has no correlation, is 0, as in the authors' code.

    Args:
        z_BD: features, of width D >= 2.
        variant: "reference" by default, because the published weight of 0.1 belongs to it.

    Returns:
        The penalty.

    Example:
        >>> import torch
        >>> z = torch.tensor([[1.0, 2.0], [-1.0, -2.0]])  # one correlation, of 1
        >>> round(float(decorrelation(z)), 4), round(float(decorrelation(z, variant="paper")), 4)
        (0.5, 1.0)

    Reference: FedDecorr (Shi et al. 2023). Deviation of the default: it sums over the batch and leaves the diagonal
    out, as in the authors' code.
    """
    check_width(z_BD=z_BD)
    batch, width = z_BD.shape
    if width < 2:
        raise ValueError("decorrelation is undefined for fewer than 2 features: there is no pair")
    check_variant(variant, ("reference", "paper"))
    with full_precision(z_BD) as (z_BD,):
        if batch == 1:
            return 0.0 * z_BD.sum()
        degrees = batch - 1 if variant == "reference" else batch
        centred_BD = z_BD - z_BD.mean(dim=0)
        x_BD = centred_BD * (centred_BD.square().sum(dim=0) / degrees + EPSILON).rsqrt()
        squared_DD = (x_BD.T @ x_BD).square()
        if variant == "paper":
            return squared_DD.sum() / (batch * width) ** 2
        # Not `trace`, whose gradient a GPU waits for.
        return (squared_DD.sum() - squared_DD.diagonal().sum()) / (width * (width - 1)) / batch


def proximal(
    parameters: Mapping[str, Tensor] | Iterable[Tensor], reference: Mapping[str, Tensor] | Iterable[Tensor], mu: float
) -> Tensor:
    """Return half the squared distance of the weights from the round's global weights, times mu.

        L = mu/2 sum_l || w_l - sg(w_g,l) ||^2

    The gradient flows into the parameters only. The reference must be a copy: if it shared memory with the live
    weights, it would move with them and the term would stay 0.

    Args:
        parameters: the live weights, in order or by name.
        reference: the global weights, in the same order or by the same names.
        mu: the strength, not negative; 0.01 if no value is published. FLESD's code leaves the 1/2 out: pass twice
            its mu.

    Returns:
        The penalty.

    Example:
        >>> import torch
        >>> float(proximal([torch.tensor([3.0, 4.0])], [torch.zeros(2)], mu=0.1))  # 0.05 * 25
        1.25

    Reference: FedProx (Li et al. 2020), Eq. 2.
    """
    if not (mu >= 0 and math.isfinite(mu)):
        raise ValueError(f"mu must be finite and not negative, not {mu}")
    if isinstance(parameters, Mapping) and isinstance(reference, Mapping):
        if parameters.keys() != reference.keys():
            raise ValueError(f"names differ: {sorted(parameters.keys() ^ reference.keys())}")
        reference = [reference[name] for name in parameters]
        parameters = parameters.values()
    elif isinstance(parameters, Mapping) or isinstance(reference, Mapping):
        raise ValueError("parameters and reference must both be mappings by name, or both be in order")
    live, fixed = list(parameters), list(reference)
    if not live or [p.shape for p in live] != [r.shape for r in fixed]:
        raise ValueError(f"shapes differ: {[tuple(p.shape) for p in live]} and {[tuple(r.shape) for r in fixed]}")
    with full_precision(*live, *(origin.detach() for origin in fixed)) as weights:
        pairs = zip(weights[: len(live)], weights[len(live) :], strict=True)
        return mu / 2 * torch.stack([(w - w_g).square().sum() for w, w_g in pairs]).sum()
