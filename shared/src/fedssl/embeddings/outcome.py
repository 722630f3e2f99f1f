"""The images of a source that were read, and those that were left out."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fedssl.data.decoding import LEAST_HIGHEST, low_range
from fedssl.embeddings.sources import Source
from fedssl.errors import DataError

_NUM_LISTED = 1000


@dataclass(frozen=True, slots=True)
class Done:
    """A batch that is done.

    Attributes:
        num: the number of its representations.
        damaged: the positions of the images that were left out, and why.
        num_deep: how many images are stored with 16 bits per value.
        highest: the highest value of those with 16 bits.
    """

    num: int
    damaged: list[tuple[int, str]]
    num_deep: int
    highest: int


def summarised(source: Source, batches: Sequence[Done]) -> tuple[int, dict[str, Any]]:
    """Return how many images were read, how many were left out, and the names of the first of these.

    Raises DataError if no image was read, or if all are too dark.
    """
    num = sum(done.num for done in batches)
    damaged = [each for done in batches for each in done.damaged]
    listed = [{"path": source.names(at, at + 1)[0], "reason": why} for at, why in damaged[:_NUM_LISTED]]
    if not num:
        first = f": {listed[0]['path']}: {listed[0]['reason']}" if listed else ""
        raise DataError(f"no image of {source.title} can be decoded{first}")
    num_deep, highest = sum(done.num_deep for done in batches), max(done.highest for done in batches)
    if num_deep and 0 < highest < LEAST_HIGHEST:
        raise DataError(f"{source.title}: {low_range(num_deep, highest)}")
    return num, {"num": len(damaged), "first": listed}
