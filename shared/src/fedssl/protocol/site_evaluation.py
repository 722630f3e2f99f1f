"""Evaluations at the sites: the only numbers that leave them.

A site gives counts per class of its own test images: which class they have and which one a classifier predicts, and how
many of them have scores within each of some intervals. Nothing is about a single image.
"""

import base64
import binascii
import math
import struct
from typing import Annotated

from pydantic import Field, field_validator, model_validator

from fedssl.protocol.base import StrictModel
from fedssl.protocol.evaluation import MOST_CLASSES, MOST_SCORE_BINS, SiteMeasure

MOST_HEAD_NUMBERS = 1 << 17
"""The most weights of a site's classifier: 100 classes of 1,000 dimensions have 100,100."""

ImageCount = Annotated[int, Field(strict=True, ge=0, le=10**9)]
CountRow = Annotated[tuple[ImageCount, ...], Field(max_length=max(MOST_CLASSES, MOST_SCORE_BINS))]
CountTable = Annotated[tuple[CountRow, ...], Field(max_length=MOST_CLASSES)]

BINARY_COLUMNS = 4
"""Columns of the confusion table of one label among several: true and false negatives, false and true positives."""


class MeasureCounts(StrictModel):
    """Counts of one classifier's predictions. K is the number of evaluated classes, B that of score bins."""

    confusion: CountTable = Field(
        description="One label per image: (K, K), rows are true and columns predicted classes. Several: (K, 4), the "
        "true negatives, false negatives, false positives and true positives of each class."
    )
    positives: CountTable = Field(description="(K, B): how many images of a class have a score for it in each bin.")
    negatives: CountTable = Field(description="(K, B): the same for images that are not of the class.")


class SiteCounts(StrictModel):
    """One site's evaluation of one encoder.

    If the encoder's training diverged, no representation is finite and `measures` is empty.
    """

    classes: Annotated[
        tuple[Annotated[int, Field(strict=True, ge=0, lt=MOST_CLASSES)], ...],
        Field(
            max_length=MOST_CLASSES,
            description="The numbers of the evaluated classes in `evaluation.sites.classes`. Other classes have too "
            "few images at this site, and none of their images is counted anywhere.",
        ),
    ]
    min_count: int = Field(ge=1, le=10**9, description="The fewest training and test images of an evaluated class.")
    num_train: ImageCount
    num_test: ImageCount
    measures: dict[SiteMeasure, MeasureCounts]

    @model_validator(mode="after")
    def _tables_fit(self) -> "SiteCounts":
        if list(self.classes) != sorted(set(self.classes)):
            raise ValueError("classes must be different and in order")
        for name, counts in self.measures.items():
            for table in (counts.confusion, counts.positives, counts.negatives):
                if len(table) != len(self.classes) or len({len(row) for row in table}) > 1:
                    raise ValueError(f"{name}: each table needs one row per evaluated class, of one length")
            if any(len(a) != len(b) for a, b in zip(counts.positives, counts.negatives, strict=True)):
                raise ValueError(f"{name}: positives and negatives need the same bins")
        return self


class SiteHead(StrictModel):
    """A linear classifier of one site, which other sites evaluate on their own images. Has at least one class."""

    classes: Annotated[
        tuple[Annotated[int, Field(strict=True, ge=0, lt=MOST_CLASSES)], ...],
        Field(
            min_length=1,
            max_length=MOST_CLASSES,
            description="The numbers of its classes in `evaluation.sites.classes`, in order. It predicts no other.",
        ),
    ]
    weights: Annotated[str, Field(max_length=MOST_HEAD_NUMBERS * 16 // 3 + 4)] = Field(
        description="(K, H + 1) in float32, little-endian, row by row, in base64: the weights of each class, then its "
        "bias."
    )

    @field_validator("classes")
    @classmethod
    def _in_order(cls, classes: tuple[int, ...]) -> tuple[int, ...]:
        if list(classes) != sorted(set(classes)):
            raise ValueError("classes must be different and in order")
        return classes

    @model_validator(mode="after")
    def _weights_are_rows(self) -> "SiteHead":
        try:
            numbers = self.numbers()
        except (binascii.Error, ValueError, struct.error):
            raise ValueError("weights are not float32 numbers in base64") from None
        if not numbers or len(numbers) % len(self.classes) or len(numbers) < 2 * len(self.classes):
            raise ValueError(f"weights have {len(numbers)} numbers, which are not {len(self.classes)} rows")
        if len(numbers) > MOST_HEAD_NUMBERS:
            raise ValueError(f"weights have {len(numbers)} numbers, more than {MOST_HEAD_NUMBERS}")
        if not all(map(math.isfinite, numbers)):
            raise ValueError("weights are not all finite numbers")
        return self

    @property
    def width(self) -> int:
        """The width H of the representations that it classifies."""
        return len(self.numbers()) // len(self.classes) - 1

    def numbers(self) -> tuple[float, ...]:
        """Return all weights, row by row."""
        content = base64.b64decode(self.weights, validate=True)
        return struct.unpack(f"<{len(content) // 4}f", content)
