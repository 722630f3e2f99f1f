"""Temperature scaling of a linear classifier's scores, from sums that add up over sites.

The scores s (C,) of ridge regression estimate the presence of each class, 0..1. They become probabilities by one scale
a > 0 (Guo et al. 2017, "On Calibration of Modern Neural Networks"):

    p = softmax(a * s),  or with several labels per image  p_c = sigmoid(a * (s_c - 1/2)).

The scale minimises the cross-entropy on n held-out images, whose targets are smoothed as by Platt (1999,
"Probabilistic outputs for support vector machines", Eq. 13): t becomes (n t + 1) / (n + C), or / (n + 2) with several
labels. Cross-entropy is linear in its targets. It is therefore (n A + B) / (n + C), where A is the sum over images of
the cross-entropy of their labels, and B is that of every label. Both are sums over images, and add over sites.

No single site must be able to choose the scale with invented sums. What it adds to the cross-entropy at one scale is
therefore limited to `LARGEST` times its number of images times log C, the cross-entropy of equal probabilities (C log 2
with several labels per image). At the best scale the mean of all sites is at most about log C, because the smallest
scale gives nearly equal probabilities, so that the limit concerns only a site whose scores are far worse than none. A
site can then move the choice only between scales whose cross-entropies differ by less than twice its share of the
held-out images, times log C.
"""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

NUM_SCALES = 41
LARGEST = 2.0
_SCALES = torch.logspace(-1, 3, NUM_SCALES, dtype=torch.float64)
_ROUNDING = 1e-9


def cross_entropy_sums(scores_NC: Tensor, labels: Tensor) -> Tensor:
    """Return A and B of each scale, float64 (2, `NUM_SCALES`): 0 without images.

    Args:
        scores_NC: the scores of held-out images, float64.
        labels: their class numbers (N,), or the presence of several labels (N, C), of 0 and 1.
    """
    sums = [_sums_at(float(scale), scores_NC, labels) for scale in _SCALES]
    return torch.stack([torch.stack([own for own, _ in sums]), torch.stack([each for _, each in sums])])


def impossible_sums(sums_2S: Tensor, num_images: int, num_classes: int, *, multi_label: bool) -> str | None:
    """Return why these cannot be the `cross_entropy_sums` of this number of images, or None if they can.

    The cross-entropy of an image's labels is a part of that of every label, and the latter is smallest for equal
    probabilities: C log C per image, or 2 C log 2 with several labels.
    """
    own_S, every_S = sums_2S
    if not bool((sums_2S.isfinite() & (sums_2S >= 0)).all()):
        return "its cross-entropies are not finite, or smaller than 0"
    least = num_images * num_classes * (2 * math.log(2) if multi_label else math.log(num_classes))
    if bool((every_S < least * (1 - _ROUNDING)).any() | (own_S > every_S * (1 + _ROUNDING)).any()):
        return f"its cross-entropies cannot be those of {num_images} images of {num_classes} classes"
    return None


def best_scale(
    sums_K2S: Sequence[Tensor], num_images: Sequence[int], num_classes: int, *, multi_label: bool
) -> tuple[float, float]:
    """Return the scale with the smallest cross-entropy of smoothed targets, and this cross-entropy per image.

    Args:
        sums_K2S: `cross_entropy_sums` of the held-out images of each site.
        num_images: the number of these images per site; the total n is at least 1.
        num_classes: C.
        multi_label: whether an image may have several labels.
    """
    total = sum(num_images)
    most = LARGEST * (num_classes * math.log(2) if multi_label else math.log(num_classes))
    smoothed = (
        ((total * own_S + every_S) / (total + (2 if multi_label else num_classes))).clamp(max=most * num)
        for (own_S, every_S), num in zip(sums_K2S, num_images, strict=True)
    )
    losses_S = torch.stack(list(smoothed)).sum(dim=0)
    best = int(losses_S.argmin())
    return float(_SCALES[best]), float(losses_S[best]) / total


def _sums_at(scale: float, scores_NC: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    if labels.ndim == 2:
        logits_NC = scale * (scores_NC - 0.5)
        own = F.binary_cross_entropy_with_logits(logits_NC, labels.double(), reduction="sum")
        return own, (F.softplus(logits_NC) + F.softplus(-logits_NC)).sum()
    log_p_NC = F.log_softmax(scale * scores_NC, dim=1)
    return -log_p_NC.gather(1, labels.long()[:, None]).sum(), -log_p_NC.sum()
