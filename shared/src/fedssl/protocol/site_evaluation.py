"""Evaluations at the sites: the only numbers that leave them.

A site gives counts per class of its own test images: which class they have and which one a classifier predicts, and how
many of them have scores within each of some intervals. Nothing is about a single image.
"""

from typing import Annotated

from pydantic import Field, model_validator

from fedssl.protocol.base import StrictModel
from fedssl.protocol.evaluation import MOST_CLASSES, MOST_SCORE_BINS, SiteMeasure

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
