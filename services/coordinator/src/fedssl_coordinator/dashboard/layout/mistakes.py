"""The mistake in a form that was refused: its field, and the reason."""

from collections.abc import Mapping
from typing import NamedTuple

from pydantic import ValidationError

from fedssl.protocol.validation import first_problem
from fedssl_coordinator.core.problems import ProblemError


class Mistake(NamedTuple):
    """The field with a mistake, empty if it is not known, and the reason. Both are empty if there is no mistake."""

    field: str = ""
    text: str = ""


NO_MISTAKE = Mistake()


def mistake_of(error: ValidationError | ProblemError, words: Mapping[str, str], field: str = "") -> Mistake:
    """Return the first mistake.

    Args:
        words: messages that replace pydantic's, by place.
        field: the field of a problem that has no place.
    """
    if isinstance(error, ProblemError):
        for first in error.errors[:1]:
            return Mistake(str(first["loc"][-1]), first["msg"])
        return Mistake(field, error.detail)
    problem = first_problem(error)
    if not problem.location:
        return Mistake(field, problem.message)
    name = next(part for part in reversed(problem.location) if isinstance(part, str))
    return Mistake(name, words.get(problem.place, f"{name}: {problem.message}"))
