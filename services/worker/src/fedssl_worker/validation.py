"""How the worker words the problems that pydantic finds."""

from collections.abc import Callable, Mapping

from pydantic import ValidationError


def describe_problems(
    error: ValidationError,
    name_of: Callable[[tuple[int | str, ...]], str],
    messages: Mapping[str, str],
    unknown_keys: Mapping[str, str] | None = None,
) -> str:
    """Return every problem as `PLACE: MESSAGE`, separated by semicolons. Leaves out values: they may be secrets.

    Args:
        name_of: returns the name of a place, or an empty text to leave it out.
        messages: replaces pydantic's message, by the type of the problem.
        unknown_keys: replaces the message about an unknown key, by its name.
    """
    lines = []
    for problem in error.errors(include_url=False, include_input=False, include_context=False):
        place = name_of(problem["loc"])
        message = messages.get(problem["type"], str(problem["msg"]).removeprefix("Value error, "))
        if unknown_keys and problem["type"] == "extra_forbidden":
            message = unknown_keys.get(place, message)
        lines.append(f"{place}: {message}" if place else message)
    return "; ".join(lines)
