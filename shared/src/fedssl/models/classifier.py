"""A linear classifier of representations, and the encoder and the classifier as one network."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from fedssl.models.pretrained import PretrainedEncoder

WEIGHT, BIAS = "classifier.weight", "classifier.bias"
CLASSES = "classes.sha256"
"""The tensors of a run that has a classifier: (C, H) and (C,) in float32, and :func:`classes_digest`."""

PERSONAL = "personal"
"""The module of a site's own classifier, which stays in its client state: `personal.weight` and `personal.bias`."""


def classes_digest(names: Sequence[str], *, multi_label: bool) -> Tensor:
    """Return a digest of the classes of a classifier and their order: a sha256 as int64 (4,).

    It is sent with the weights, so that a classifier is never mistaken for one of other classes.
    """
    text = json.dumps([list(names), multi_label], ensure_ascii=False, separators=(",", ":"))
    digest = hashlib.sha256(text.encode()).digest()
    numbers = [int.from_bytes(digest[start : start + 8], "big", signed=True) for start in range(0, len(digest), 8)]
    return torch.tensor(numbers, dtype=torch.int64)


@dataclass(frozen=True, slots=True)
class Head:
    """A linear classifier of representations.

    Attributes:
        weight: float32 (C, H).
        bias: float32 (C,).
        class_names: the classes by number.
        multi_label: whether an image may have several of the classes, or none.
        about: what identifies the encoder and how it was fitted, for the metadata of its file.
    """

    weight: Tensor
    bias: Tensor
    class_names: tuple[str, ...]
    multi_label: bool
    about: dict[str, Any] = field(default_factory=dict)

    def probabilities(self, h_NH: Tensor) -> Tensor:
        """Return the probability (N, C) of each class: a softmax of the scores, or sigmoids if `multi_label`."""
        scores_NC = h_NH @ self.weight.T + self.bias
        return scores_NC.sigmoid() if self.multi_label else scores_NC.softmax(dim=1)


class Classifier(nn.Module):
    """From images (B, C, S, S) of values 0..1 to probabilities (B, number of classes)."""

    def __init__(self, encoder: PretrainedEncoder, head: Head) -> None:
        super().__init__()
        self.encoder = encoder
        self.head = head

    def forward(self, x: Tensor) -> Tensor:
        return self.head.probabilities(self.encoder(x))
