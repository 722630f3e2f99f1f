"""Temperature scaling of a linear classifier's scores, from sums that add up over sites.

The scores s (C,) of ridge regression estimate the presence of each class, 0..1. They become probabilities by one scale
a > 0 (Guo et al. 2017, "On Calibration of Modern Neural Networks"):

    p = softmax(a * s),  or with several labels per image  p_c = sigmoid(a * (s_c - 1/2)).

The scale minimises the cross-entropy on n held-out images, whose targets are smoothed as by Platt (1999,
"Probabilistic outputs for support vector machines", Eq. 13): t becomes (n t + 1) / (n + C), or / (n + 2) with several
labels. Cross-entropy is linear in its targets. It is therefore (n A + B) / (n + C), where A is the sum over images of
the cross-entropy of their labels, and B is that of every label. Both are sums over images, and add over sites.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

NUM_SCALES = 41
_SCALES = torch.logspace(-1, 3, NUM_SCALES, dtype=torch.float64)


def cross_entropy_sums(scores_NC: Tensor, labels: Tensor) -> Tensor:
    """Return A and B of each scale, float64 (2, `NUM_SCALES`): 0 without images.

    Args:
        scores_NC: the scores of held-out images, float64.
        labels: their class numbers (N,), or the presence of several labels (N, C), of 0 and 1.
    """
    sums = [_sums_at(float(scale), scores_NC, labels) for scale in _SCALES]
    return torch.stack([torch.stack([own for own, _ in sums]), torch.stack([each for _, each in sums])])


def best_scale(sums_2S: Tensor, num_images: int, num_classes: int, *, multi_label: bool) -> tuple[float, float]:
    """Return the scale with the smallest cross-entropy of smoothed targets, and this cross-entropy per image.

    Args:
        sums_2S: `cross_entropy_sums` of all held-out images.
        num_images: n, at least 1.
        num_classes: C.
        multi_label: whether an image may have several labels.
    """
    losses_S = (num_images * sums_2S[0] + sums_2S[1]) / (num_images + (2 if multi_label else num_classes))
    best = int(losses_S.argmin())
    return float(_SCALES[best]), float(losses_S[best]) / num_images


def _sums_at(scale: float, scores_NC: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    if labels.ndim == 2:
        logits_NC = scale * (scores_NC - 0.5)
        own = F.binary_cross_entropy_with_logits(logits_NC, labels.double(), reduction="sum")
        return own, (F.softplus(logits_NC) + F.softplus(-logits_NC)).sum()
    log_p_NC = F.log_softmax(scale * scores_NC, dim=1)
    return -log_p_NC.gather(1, labels.long()[:, None]).sum(), -log_p_NC.sum()
