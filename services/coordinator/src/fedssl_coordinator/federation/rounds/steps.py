"""The steps of a run between two computations, and what the caller returns with from each."""

from dataclasses import dataclass
from enum import Enum, auto
from uuid import UUID


class Step(Enum):
    """The caller's next step."""

    PREPARE = auto()
    AGGREGATE = auto()
    CHECK_INPUTS = auto()
    COUNT_WORDS = auto()
    CHECK_AGAIN = auto()
    WAIT = auto()


@dataclass(frozen=True, slots=True)
class CheckedInputs:
    """The result of a check of what a round's clients get from the coordinator: its `faults`, or none."""

    round_id: UUID
    faults: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class NextVector:
    """The masked vector of each client in the next round: its number of words, and `RoundContext.total_bits`."""

    num_words: int
    total_bits: tuple[int, int] | None
