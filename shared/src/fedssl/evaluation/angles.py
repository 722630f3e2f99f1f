"""FedX's analysis of the embedding space: how far a client's embeddings turn from the global model's (section 4.3)."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from fedssl.evaluation.geometry import angle_between, inter_class_angles


@dataclass(frozen=True, slots=True)
class Angles:
    """Angles between embeddings, in degrees.

    Attributes:
        local_global: mean angle between the two models' embeddings of an image (Eq. 14).
        by_class: the same for the images of each class, by its number (Fig. 6a); classes without images are left out.
        inter_class_local, inter_class_global: mean angle between the mean embeddings of two classes (Eq. 15-16,
            Fig. 6b), of each model; NaN if there is only one class.
    """

    local_global: float
    by_class: dict[int, float]
    inter_class_local: float
    inter_class_global: float


def compare_embeddings(local_ND: Tensor, global_ND: Tensor, labels_N: Tensor) -> Angles:
    """Return FedX's angles between a client's model and the global one.

    Args:
        local_ND, global_ND: projector outputs (N, D) of the same test images under the two models. FedX reports mean
            angles above 90 degrees, which representations after a ReLU cannot have.
        labels_N: class numbers of the images.
    """
    angles_N = angle_between(local_ND, global_ND)
    labels_N = labels_N.to(angles_N.device)
    return Angles(
        local_global=_mean(angles_N),
        by_class={int(label): _mean(angles_N[labels_N == label]) for label in torch.unique(labels_N)},
        inter_class_local=_mean(inter_class_angles(local_ND, labels_N)),
        inter_class_global=_mean(inter_class_angles(global_ND, labels_N)),
    )


def _mean(values: Tensor) -> float:
    return float(values.mean()) if len(values) else math.nan
