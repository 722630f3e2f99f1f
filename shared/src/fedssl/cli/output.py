"""What goes to standard output (results) and to standard error (everything else)."""

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedssl.cli.errors import printable

if TYPE_CHECKING:
    from rich.console import Console

PIPE_WIDTH = 200


class Format(StrEnum):
    """How results are written."""

    TABLE = "table"
    JSON = "json"


FormatOption = Annotated[
    Format,
    typer.Option("--format", help="`json`: one document on standard output and nothing else there."),
]


def console(*, stderr: bool = False) -> "Console":
    """A console that prints strings as they are: what comes from a coordinator is no markup."""
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() else PIPE_WIDTH  # not cut to a terminal that is not there
    return Console(stderr=stderr, markup=False, highlight=False, emoji=False, width=width)


def note(text: str) -> None:
    """A remark for the person, never part of the result."""
    typer.echo(text, err=True)


def show_json(value: Any) -> None:
    """One JSON document on standard output. Models (and lists of them) are dumped."""
    typer.echo(json.dumps(_plain(value), indent=2, ensure_ascii=False))


def show_table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """A table on standard output; columns whose name begins with `#` are numbers, aligned to the right."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    drawn = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in columns:
        drawn.add_column(name.removeprefix("#"), justify="right" if name.startswith("#") else "left", overflow="fold")
    for row in rows:
        drawn.add_row(*(Text(cell(value)) for value in row))
    console().print(drawn)


def show_pairs(pairs: Mapping[str, object]) -> None:
    """Names and values, one pair a line."""
    from rich.table import Table
    from rich.text import Text

    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column(overflow="fold")
    for name, value in pairs.items():
        grid.add_row(Text(name), Text(cell(value)))
    console().print(grid)


def cell(value: object) -> str:
    """A value as people read it: nothing as a dash, times in UTC to the second.

    >>> cell(None), cell(0.5), cell(12000)
    ('-', '0.5', '12,000')
    """
    if value is None or value == "":
        return "-"
    if isinstance(value, datetime):
        return value.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%SZ")
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:.6g}"
    return printable(str(value))


def duration(seconds: float) -> str:
    """Seconds as minutes and seconds, or with hours.

    >>> duration(65), duration(3700)
    ('1:05', '1:01:40')
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def _plain(value: Any) -> Any:
    if hasattr(value, "model_dump"):
        return value.model_dump(mode="json")
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value
