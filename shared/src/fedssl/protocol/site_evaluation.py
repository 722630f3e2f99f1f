"""Evaluations at the sites: what a site is asked for, and the only numbers that it sends.

A site sends counts per class of its own test images: which class they have and which one a classifier predicts, and how
many of them have scores within each of some intervals. Nothing is about a single image.
"""

from typing import Annotated
from uuid import UUID

from pydantic import Field, model_validator

from fedssl.protocol.base import ClientId, Digest, StrictModel
from fedssl.protocol.evaluation import MOST_CLASSES, MOST_SCORE_BINS, SiteMeasure
from fedssl.protocol.runs import RunSpec
from fedssl.protocol.work import Anchor, Receipt, ShortText

ImageCount = Annotated[int, Field(strict=True, ge=0, le=10**9)]
CountRow = Annotated[tuple[ImageCount, ...], Field(max_length=max(MOST_CLASSES, MOST_SCORE_BINS))]
CountTable = Annotated[tuple[CountRow, ...], Field(max_length=MOST_CLASSES)]
EvaluatedRound = Annotated[int, Field(ge=0, le=100_000, description="The round, or 0 before training.")]

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


class SiteEvaluationItem(StrictModel):
    """An encoder that a site is asked to evaluate. It holds nothing up: there is no lease and no deadline."""

    run_id: UUID
    round_number: EvaluatedRound
    client_id: ClientId
    spec: RunSpec
    method_version: int
    model: Digest


class SiteEvaluationSubmit(StrictModel):
    """A site's counts, or why it has none. The first answer to an item stays; the same again gets the same reply."""

    run_id: UUID
    round_number: EvaluatedRound
    model: Digest
    counts: SiteCounts | None = None
    reason: ShortText | None = Field(default=None, description="Why the site does not evaluate this encoder.")
    anchor: Anchor = None

    @model_validator(mode="after")
    def _has_one_answer(self) -> "SiteEvaluationSubmit":
        if (self.counts is None) == (self.reason is None):
            raise ValueError("give either counts, or a reason why there are none")
        return self


class SiteEvaluationReceived(StrictModel):
    """The coordinator has the answer, or one that came before it."""

    receipt: Receipt = None
