"""The wording of messages for people."""

from collections.abc import MutableMapping
from typing import Any


def plural(count: int, one: str, many: str | None = None) -> str:
    """Return a count with its noun, which is in the singular only for 1.

    >>> plural(1, "round"), plural(1200, "round"), plural(0, "entry", "entries")
    ('1 round', '1,200 rounds', '0 entries')
    """
    return f"{count:,} {one if count == 1 else many or one + 's'}"


def apart(value: float, limit: float, digits: int = 3) -> tuple[str, str]:
    """Return two numbers with `digits` significant digits, or with more if they would look equal.

    >>> apart(1.99999, 2), apart(1.5, 2), apart(2, 2)
    (('1.99999', '2'), ('1.5', '2'), ('2', '2'))
    """
    numbers = ((f"{value:.{each}g}", f"{limit:.{each}g}") for each in range(digits, 18))
    return next((each for each in numbers if each[0] != each[1]), (f"{value:.{digits}g}", f"{limit:.{digits}g}"))


def printable(text: str) -> str:
    """Replace control characters, with which a worker's message could redraw the terminal.

    >>> printable("declined: \\x1b[2Jno")
    'declined: ?[2Jno'
    """
    return "".join(char if char.isprintable() or char == "\n" else "?" for char in text)


def in_one_line(text: str) -> str:
    """Return printable text without line breaks, with which a message could look like further messages.

    >>> in_one_line("no room\\nround 1 closed")
    'no room round 1 closed'
    """
    return printable(" ".join(line.strip() for line in text.splitlines()))


def reason_of(error: Exception) -> str:
    """Return the first line of an error, or its kind if it has no text."""
    return str(error).splitlines()[0] if str(error) else type(error).__name__


def in_one_line_each(_logger: object, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Make each text of a log line printable, in one line, as a processor of structlog.

    JSON escapes other characters; lines for a terminal contain texts unchanged.
    """
    return {name: in_one_line(value) if isinstance(value, str) else value for name, value in event.items()}
