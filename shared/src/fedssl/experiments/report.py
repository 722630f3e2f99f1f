"""Published and measured numbers as Markdown: all results of a folder, one section per table."""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from fedssl.experiments import papers
from fedssl.experiments.reproduction import CellResult, Difference
from fedssl.experiments.spread import Spread, spread


def render(results: Sequence[CellResult]) -> str:
    """Return the body of a Markdown document, with a table for each of the papers' tables that has results.

    Accuracies are percent of the test set; numbers are means over seeds with their sample standard deviation. "drawn"
    stands for a number that the paper only draws. Settings that differ from the paper's are listed below each table,
    numbered.
    """
    sections = []
    for table in papers.tables():
        own = [result for result in results if result.table == table]
        if own:
            sections.append("\n".join(_section(table, own)))
    return "\n\n".join(sections) + "\n" if sections else "There are no results yet.\n"


def _section(table: str, results: Sequence[CellResult]) -> Iterator[str]:
    about = papers.published()[table]
    yield f"## {table}: {about['title']}"
    yield ""
    yield f"{about['source']}."
    yield ""
    yield "| row | column | measure | published | measured | difference | seeds | time | settings |"
    yield "|---|---|---|---:|---:|---:|---:|---:|---|"
    order = {cell: at for at, cell in enumerate(_places(table))}
    settings: dict[str, int] = {}
    for result in sorted(results, key=lambda each: order.get((each.row, each.column), len(order))):
        text = describe(result)
        number = settings.setdefault(text, len(settings) + 1)
        yield from _rows(result, number)
    yield ""
    for text, number in settings.items():
        yield f"{number}. {text}"
    cells = {(result.row, result.column) for result in results}
    yield ""
    yield f"Run: {len(cells)} of {len(order)} cells."


def _rows(result: CellResult, number: int) -> Iterator[str]:
    for name, published in result.published.items():
        found = spread(result.measured[name])
        numbers = (printed(published), shown(found), difference(published, found))
        cells = (result.row, result.column, name, *numbers, len(result.seeds), rounded_time(result.seconds))
        yield f"| {' | '.join(map(str, cells))} | {number} |"


def describe(result: CellResult) -> str:
    """Return one line with the device, the settings that differ from the paper's, and other differences."""
    settings = ", ".join(_difference(each) for each in result.differences) or "the paper's settings"
    notes = "".join(f"; {note}" for note in result.notes)
    return f"{result.device}: {settings}{notes}."


def printed(published: float | None) -> str:
    """Return a paper's number as text.

    >>> printed(56.88), printed(None)
    ('56.88', 'drawn')
    """
    return "drawn" if published is None else f"{published:.2f}"


def difference(published: float | None, found: Spread | None) -> str:
    """Return the measured mean minus the paper's number, or "-" if one of them is missing."""
    return "-" if published is None or found is None else f"{found.mean - published:+.2f}"


def shown(found: Spread | None) -> str:
    """Return a mean and its deviation as text."""
    if found is None:
        return "-"
    return f"{found.mean:.2f}" if found.deviation is None else f"{found.mean:.2f} ± {found.deviation:.2f}"


def rounded_time(seconds: float) -> str:
    """Return a time as text.

    >>> rounded_time(20), rounded_time(100), rounded_time(6000)
    ('20 s', '2 min', '1.7 h')
    """
    if seconds < 60:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 3600 else f"{seconds / 3600:.1f} h"


def _difference(each: Difference) -> str:
    return f"`{each.key}` {value(each.here)} (paper: {value(each.paper)})"


def value(given: Any) -> str:
    """Return a setting as text. Files are given only by name, because their folder is specific to this machine.

    >>> value("/data/sets/cifar10"), value([512]), value(None)
    ('cifar10 (own files)', '[512]', 'none')
    """
    if given is None:
        return "none"
    if isinstance(given, str) and Path(given).is_absolute():
        return f"{Path(given).name} (own files)"
    return str(given)


def _places(table: str) -> Iterable[tuple[str, str]]:
    rows = papers.published()[table]["rows"]
    return [(row, column) for row, columns in rows.items() for column in columns]
