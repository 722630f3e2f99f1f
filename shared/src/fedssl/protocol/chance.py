"""Chance: the accuracy of being right without an encoder, the baseline of `probe` and `knn`.

For balanced accuracy, chance is 1 / classes: a constant answer has a recall of 1 in one class and of 0 in the others.
If an image may have several labels, it is 1/2: a constant answer has a sensitivity of 1 and a specificity of 0, or the
reverse.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

CHANCE_KEY = "chance"


@dataclass(frozen=True, slots=True)
class Chance:
    """The accuracy of a classifier that sees no image: it always answers the most frequent class of the test set.

    If the classes are equally frequent, that is 1 / classes.
    """

    accuracy: float
    num_classes: int

    @property
    def how(self) -> str:
        """How the number comes about, for people."""
        if abs(self.accuracy * self.num_classes - 1) < 1e-9:
            return f"1 of {self.num_classes:,} classes"
        return f"the share of the largest of {self.num_classes:,} classes"

    def as_json(self) -> dict[str, object]:
        """Return the numbers and how they are computed, for JSON."""
        return {"accuracy": self.accuracy, "num_classes": self.num_classes, "how": self.how}


class ChanceOfLabels(Chance):
    """Chance if an image may have several labels: the share of all pairs of an image and a class that are right if the
    answer for each class is the more frequent one: that an image has it, or that it does not."""

    @property
    def how(self) -> str:
        """How the number comes about, for people."""
        return f"the more frequent answer, yes or no, for each of {self.num_classes:,} classes"


def chance_of_labels(num_with: Sequence[int], num_images: int) -> Chance:
    """Return the chance on images with several labels, from how many of them have each class.

    >>> chance_of_labels([1, 8], 10).accuracy
    0.85
    """
    num_right = sum(max(num, num_images - num) for num in num_with)
    return ChanceOfLabels(num_right / (num_images * len(num_with)), len(num_with))


def chance_of(labels: Iterable[int]) -> Chance | None:
    """Return the chance on images with these labels; None if there are no images.

    >>> chance_of([0, 1, 0, 1]).how
    '1 of 2 classes'
    >>> chance_of([0, 0, 0, 1])
    Chance(accuracy=0.75, num_classes=2)
    """
    counts: dict[int, int] = {}
    for label in labels:
        counts[label] = counts.get(label, 0) + 1
    return Chance(max(counts.values()) / sum(counts.values()), len(counts)) if counts else None
