"""Ridge regression from representations to labels, from sums that add up over sites.

For representations h (N, H) and one-hot labels Y (N, C), let X = [h, 1] (N, H+1). The weights W (H+1, C) minimise

    ||X W - Y||^2 + ridge * ||W[:H]||^2,

so they solve (X'X + ridge * D) W = X'Y, where D is the identity with a 0 in place of its last 1 (Hoerl and Kennard
1970; Hastie, Tibshirani and Friedman, "The Elements of Statistical Learning", 3.4.1). X'X and X'Y are sums over images.
If each site computes its own, their sum gives the solution for all sites' images together, however these are
distributed.

The weights of the column of ones, the intercepts, are not penalised: they carry how frequent the classes are. If they
were penalised, the scores would be drawn towards 0, and would depend on where the representations have their origin.
"""

import torch
from torch import Tensor

from fedssl.errors import ArtifactError, DataError, NotFinite
from fedssl.evaluation.features import require_finite

_CHUNK = 8192
_ASYMMETRY = 1e-9  # relative to the diagonal; rounding is a million times smaller
_PATH = torch.logspace(-6, 3, 10, dtype=torch.float64)

NUM_PENALTIES = len(_PATH)
"""How many penalties :func:`ridge_path` returns."""


def ridge_sums(h_NH: Tensor, labels_N: Tensor, num_classes: int) -> tuple[Tensor, Tensor]:
    """Return the Gram matrix X'X (H+1, H+1) and the moment X'Y (H+1, C), in float64 on the device of `h_NH`.

    Sums of several sites, or of parts of one site's images, add. The last element of the Gram matrix is the number of
    images; the last row of the moment is their number per class. Without images, both are 0.

    Args:
        h_NH: representations of any floating dtype; they are converted to float64 some thousands at a time.
        labels_N: class numbers (N,), or for several labels per image their presence (N, C), of 0 and 1.
        num_classes: C, which all sites agree on. A site need not have images of every class.

    Raises:
        ValueError: a representation is not finite.
        DataError: the labels are not one class below C, or one row of C zeros and ones, per image.
    """
    require_finite(h_NH)
    _require_labels(labels_N, len(h_NH), num_classes)
    width = h_NH.shape[1] + 1
    gram = torch.zeros(width, width, dtype=torch.float64, device=h_NH.device)
    moment = torch.zeros(width, num_classes, dtype=torch.float64, device=h_NH.device)
    for start in range(0, len(h_NH), _CHUNK):
        h_BH = h_NH[start : start + _CHUNK].detach().double()
        x_BX = torch.cat([h_BH, h_BH.new_ones(len(h_BH), 1)], dim=1)
        part = labels_N[start : start + _CHUNK].to(h_NH.device)
        y_BC = torch.nn.functional.one_hot(part.long(), num_classes) if part.ndim == 1 else part
        gram += x_BX.T @ x_BX
        moment += x_BX.T @ y_BC.double()
    return _symmetric(gram), moment


def require_sums(gram: Tensor, moment: Tensor, num_images: int | None = None) -> None:
    """Raise ArtifactError unless these can be the sums of :func:`ridge_sums`.

    Args:
        gram: (H+1, H+1).
        moment: (H+1, C).
        num_images: the number of the site's images, which the sums must not exceed; None if it is not known.
    """
    if gram.ndim != 2 or gram.shape[0] != gram.shape[1] or moment.ndim != 2 or len(moment) != len(gram):
        raise ArtifactError(
            f"the sums must have shapes (H+1, H+1) and (H+1, C); they have {tuple(gram.shape)} and "
            f"{tuple(moment.shape)}"
        )
    if gram.dtype != torch.float64 or moment.dtype != torch.float64:
        raise ArtifactError(f"the sums must be float64, which is what keeps them exact; they are {gram.dtype}")
    if not bool(gram.isfinite().all() & moment.isfinite().all()):
        raise NotFinite("the sums hold NaN or infinity: they must be computed from finite representations")
    scale = gram.diagonal().clamp(min=0).sqrt()
    if bool(((gram - gram.T).abs() > _ASYMMETRY * scale.outer(scale)).any()):
        raise ArtifactError("the Gram matrix is not symmetric, so it is not the sum of products of representations")
    num, per_class = float(gram[-1, -1]), moment[-1]
    if num < 0 or bool((per_class < 0).any() | (per_class > num).any()):
        raise ArtifactError(f"the sums are of {num:g} images, and have classes with fewer than 0 or more than all")
    if num_images is not None and num > num_images:
        raise ArtifactError(f"the sums claim {num:,.0f} images, but there are only {num_images:,}")


def ridge_solution(gram: Tensor, moment: Tensor, ridge: float) -> Tensor:
    """Return the weights (H+1, C) in float64; the predictions for h are [h, 1] @ weights, one score per class.

    Args:
        gram, moment: the sums of :func:`ridge_sums`, added over all sites.
        ridge: the penalty of the weights, not negative; see :func:`ridge_path`. The column of ones is not penalised.

    Raises:
        ArtifactError: the sums cannot be sums of representations, or they do not determine the weights, which a larger
            `ridge` does.
        DataError: all images have the same labels, or there are none.
        ValueError: `ridge` is negative or not finite.
    """
    require_sums(gram, moment)
    if not 0 <= ridge < float("inf"):
        raise ValueError(f"ridge must be finite and not negative; it is {ridge}")
    num, per_class = gram[-1, -1], moment[-1]
    if not bool(((per_class > 0) & (per_class < num)).any()):
        raise DataError(
            f"the labels of the {float(num):,.0f} images do not differ: a classifier needs images of two classes"
        )
    penalised = _symmetric(gram)
    penalised.diagonal()[:-1] += ridge
    # Scaled to a diagonal of ones: representations and the column of ones may differ in size by orders of magnitude.
    scale = penalised.diagonal().clamp(min=torch.finfo(torch.float64).tiny).rsqrt()[:, None]
    factor, failed = torch.linalg.cholesky_ex(penalised * scale * scale.T)
    weights = scale * torch.cholesky_solve(scale * moment, factor)
    if bool(failed) or not bool(weights.isfinite().all()):
        raise ArtifactError(f"the sums of {float(num):,.0f} images do not determine the weights: take a larger ridge")
    return weights


def ridge_path(gram: Tensor) -> list[float]:
    """Return ten penalties for :func:`ridge_solution`, the smallest first.

    They are 1e-6 to 1e3 times the mean of the Gram matrix's diagonal without the column of ones, so that they scale
    with the representations and the number of images. All sites derive equal penalties from the summed Gram matrix.
    """
    return (_PATH * float(gram.diagonal()[:-1].mean())).tolist()


def _require_labels(labels: Tensor, num_images: int, num_classes: int) -> None:
    several = labels.ndim == 2
    if tuple(labels.shape) != ((num_images, num_classes) if several else (num_images,)):
        raise DataError(
            f"there are labels of shape {tuple(labels.shape)} for {num_images:,} images of {num_classes} classes: give "
            "one class number per image, or one row of zeros and ones"
        )
    if not len(labels):
        return
    if several and not bool(((labels == 0) | (labels == 1)).all()):
        raise DataError("rows of labels must be 0 or 1 per class; other values were given")
    lowest, highest = int(labels.min()), int(labels.max())
    if not several and (labels.is_floating_point() or lowest < 0 or highest >= num_classes):
        raise DataError(
            f"labels must be whole numbers from 0 to {num_classes - 1}; they are {lowest} to {highest} ({labels.dtype})"
        )


def _symmetric(matrix: Tensor) -> Tensor:
    """Return a copy with the upper triangle in place of the lower one, which differs from it by rounding."""
    return matrix.triu() + matrix.triu(1).T
