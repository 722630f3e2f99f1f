"""A linear classifier of representations, and the encoder and the classifier as one network."""

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from fedssl.models.pretrained import PretrainedEncoder


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
