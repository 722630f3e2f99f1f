"""Linear classifiers of representations that sites evaluate: those of the run, and those of other sites.

A classifier is float32 (C, H + 1): the weights of each of the run's classes, then its bias.
"""

import base64
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from fedssl.errors import DataError
from fedssl.models.classifier import BIAS, PERSONAL, WEIGHT
from fedssl.protocol.evaluation import SiteMeasure, SitesConfig
from fedssl.protocol.site_evaluation import SiteHead

PERSONAL_WEIGHT, PERSONAL_BIAS = f"{PERSONAL}.weight", f"{PERSONAL}.bias"

NO_HEADS: Mapping[SiteMeasure, Tensor] = {}


def run_heads(
    config: SitesConfig, model: Mapping[str, Tensor], state: Mapping[str, Tensor] | None
) -> dict[SiteMeasure, Tensor]:
    """Return the run's classifiers that a site evaluates by `evaluation.sites`.

    Args:
        model: the weights after the round.
        state: the client's state after the round. A site that has none begins with the classifier of all sites.
    """
    if not config.run_heads:
        return {}
    rows = torch.cat([model[WEIGHT], model[BIAS][:, None]], dim=1).float()
    found: dict[SiteMeasure, Tensor] = {"classifier": rows}
    if "personal" in config.run_heads:
        own = state if state is not None and PERSONAL_WEIGHT in state else None
        found["personal"] = (
            rows if own is None else torch.cat([own[PERSONAL_WEIGHT], own[PERSONAL_BIAS][:, None]], dim=1)
        )
    return found


def packed(rows_KX: Tensor, classes: Sequence[int]) -> SiteHead:
    """Return a classifier of some classes in the form that is sent. `rows_KX`: float32 (K, H + 1)."""
    numbers = rows_KX.detach().cpu().numpy().astype("<f4")
    return SiteHead(classes=tuple(classes), weights=base64.b64encode(numbers.tobytes()).decode())


def unpacked(head: SiteHead, num_classes: int) -> Tensor:
    """Return the rows (C, H + 1). A class that the classifier does not have gets a bias of minus infinity."""
    numbers = np.frombuffer(base64.b64decode(head.weights), "<f4").astype(np.float32)
    own = torch.from_numpy(numbers).view(len(head.classes), -1)
    rows = torch.zeros(num_classes, own.shape[1])
    rows[:, -1] = -torch.inf
    rows[list(head.classes)] = own
    return rows


def head_scores(rows_KX: Tensor, h_NH: Tensor, *, multi_label: bool) -> Tensor:
    """Return the probabilities (N, K) of some classes.

    Raises DataError if the classifier has another width, or weights so large that the probabilities are not defined.
    """
    if rows_KX.shape[1] != h_NH.shape[1] + 1:
        raise DataError(
            f"the classifier expects representations of width {rows_KX.shape[1] - 1}, and this encoder's have "
            f"width {h_NH.shape[1]}"
        )
    rows_KX = rows_KX.to(h_NH.device)
    logits_NK = h_NH.float() @ rows_KX[:, :-1].T + rows_KX[:, -1]
    scores_NK = logits_NK.sigmoid() if multi_label else logits_NK.softmax(dim=1)
    if not bool(scores_NK.isfinite().all()):
        raise DataError("the classifier gives scores that are not finite numbers: its weights are too large")
    return scores_NK


def require_common(head: SiteHead, classes: Sequence[int]) -> None:
    """Raise DataError unless the classifier has one of the classes that a site evaluates."""
    if not set(head.classes) & set(classes):
        raise DataError("the classifier has none of the classes with enough images at this site")
