"""The wording of the problems that pydantic finds. Leaves out the values, which may be secrets."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from pydantic import StringConstraints, ValidationError

Location = tuple[int | str, ...]

_EXPLAINED: dict[str, str] = {}


def explained(pattern: str, words: str, max_length: int | None = None) -> StringConstraints:
    """Return the constraint of a text whose problem is reported as `words`, and not as the regular expression."""
    _EXPLAINED[pattern] = words
    return StringConstraints(pattern=pattern, max_length=max_length)


def message_of(problem: Mapping[str, Any]) -> str:
    """Return the message of one of pydantic's problems, which must have its context."""
    message: str = problem["msg"]
    pattern = problem.get("ctx", {}).get("pattern", "")
    return _EXPLAINED.get(pattern, message.removeprefix("Value error, "))


class ValidationProblem(NamedTuple):
    """One problem: where, pydantic's type of it, and its message."""

    location: Location
    kind: str
    message: str

    @property
    def place(self) -> str:
        """The location as dotted text, empty if the problem is about the whole value."""
        return dotted(self.location)


def validation_problems(error: ValidationError) -> list[ValidationProblem]:
    """Return all problems, in pydantic's order."""
    found = error.errors(include_url=False, include_input=False)
    return [ValidationProblem(each["loc"], each["type"], message_of(each)) for each in found]


def first_problem(error: ValidationError) -> ValidationProblem:
    """Return the first problem."""
    return validation_problems(error)[0]


def dotted(location: Location) -> str:
    """Write a location as dotted text.

    >>> dotted(("allow", 0, "artifact"))
    'allow.0.artifact'
    """
    return ".".join(map(str, location))


def describe_problems(
    error: ValidationError,
    name_of: Callable[[Location], str] = dotted,
    messages: Mapping[str, str] | None = None,
    unknown_keys: Mapping[str, str] | None = None,
) -> str:
    """Return every problem as `PLACE: MESSAGE`, separated by semicolons.

    Args:
        name_of: returns the name of a place, or an empty text to leave it out.
        messages: replaces pydantic's message, by the kind of the problem.
        unknown_keys: replaces the message about an unknown key, by its name.
    """
    lines = []
    for problem in validation_problems(error):
        place = name_of(problem.location)
        message = (messages or {}).get(problem.kind, problem.message)
        if unknown_keys and problem.kind == "extra_forbidden":
            message = unknown_keys.get(place, message)
        lines.append(f"{place}: {message}" if place else message)
    return "; ".join(lines)
