"""The worker's words for what pydantic finds wrong."""

from collections.abc import Callable, Mapping

from pydantic import ValidationError


def describe_problems(
    error: ValidationError, name_of: Callable[[tuple[int | str, ...]], str], messages: Mapping[str, str]
) -> str:
    """Return every problem as `PLACE: MESSAGE`, separated by semicolons. Values are left out: they may be secrets.

    Args:
        name_of: names a place; an empty name leaves it out.
        messages: what to write instead of pydantic's message, by the type of the problem.
    """
    lines = []
    for problem in error.errors(include_url=False, include_input=False, include_context=False):
        message = messages.get(problem["type"], str(problem["msg"]).removeprefix("Value error, "))
        place = name_of(problem["loc"])
        lines.append(f"{place}: {message}" if place else message)
    return "; ".join(lines)
