"""Small pictures that need no script: the ribbon of verdicts and the sparkline, as SVG attributes."""

from collections.abc import Sequence

from fedssl.protocol.states import Verdict
from fedssl.wording import plural
from fedssl_coordinator.core.models import Round

_HEIGHTS = {"a": 6, "p": 11, "s": 3, "f": 16, "d": 6}
_LETTERS = {Verdict.AGGREGATED: "a", Verdict.PARTIAL: "p", Verdict.SKIPPED: "s", Verdict.FAILED: "f"}
UNCLOSED = "d"
_SPARK_WIDTH, _SPARK_HEIGHT = 72, 22


def letter(row: Round) -> str:
    """Return a round's verdict as one letter, `d` if it is not closed yet."""
    return UNCLOSED if row.verdict is None else _LETTERS[Verdict(row.verdict)]


def ribbon(rounds: Sequence[Round]) -> tuple[str, str]:
    """Return the letters of the rounds' verdicts, oldest first, and how often each occurs, in words."""
    counts: dict[str, int] = {}
    for row in rounds:
        if row.verdict is not None:
            counts[row.verdict] = counts.get(row.verdict, 0) + 1
    words = ", ".join(f"{count} {verdict}" for verdict, count in counts.items()) or "none closed yet"
    return "".join(letter(row) for row in rounds), f"last {plural(len(rounds), 'round')}: {words}"


def bars(letters: str) -> list[tuple[str, int, int, int]]:
    """Return the class, x, y and height of each letter's bar, three units apart."""
    return [(name, 3 * index, 16 - _HEIGHTS[name], _HEIGHTS[name]) for index, name in enumerate(letters)]


def spark(values: Sequence[float]) -> str:
    """Return the path of a sparkline, empty for fewer than two numbers."""
    if len(values) < 2:
        return ""
    low, high = min(values), max(values)
    span, pad = (high - low) or 1.0, 2
    across, tall = (_SPARK_WIDTH - 2 * pad) / (len(values) - 1), _SPARK_HEIGHT - 2 * pad
    steps = [
        f"{pad + index * across:.1f} {pad + tall - (value - low) / span * tall:.1f}"
        for index, value in enumerate(values)
    ]
    return "M" + "L".join(steps)
