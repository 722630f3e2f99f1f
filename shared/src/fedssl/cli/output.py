"""The output of a command: results to standard output, everything else to standard error."""

import codecs
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedssl.run_files import finite
from fedssl.wording import printable

if TYPE_CHECKING:
    from pydantic import BaseModel
    from rich.console import Console

PIPE_WIDTH = 200


class Format(StrEnum):
    """How results are written."""

    TABLE = "table"
    JSON = "json"


FormatOption = Annotated[
    Format,
    typer.Option("--format", help="`json` writes one document to standard output, and nothing else there."),
]


def console(*, stderr: bool = False) -> "Console":
    """Return a console that prints strings unchanged: text from a coordinator is not markup."""
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    # A pipe has no terminal whose width could be used, and a closed stream is None.
    width = None if stream is not None and stream.isatty() else PIPE_WIDTH
    return Console(stderr=stderr, markup=False, highlight=False, emoji=False, width=width)


def note(text: str) -> None:
    """Print a remark for a person, which is not part of the result."""
    typer.echo(printable(text), err=True)


def show_json(value: Any) -> None:
    """Print one JSON document. Pydantic models, also inside lists and tables, are dumped. NaN becomes null."""
    document = json.dumps(finite(value), default=_dumped, indent=2, ensure_ascii=_lacks_characters())
    typer.echo(_escaped(document))


def show_json_line(value: "BaseModel") -> None:
    """Print a model as JSON in one line."""
    typer.echo(_escaped(value.model_dump_json(ensure_ascii=_lacks_characters())))


def _lacks_characters() -> bool:
    """Return whether standard output has an encoding other than those of Unicode: JSON escapes the characters then."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    return not codecs.lookup(encoding).name.startswith("utf")


def show_table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print a table. Columns whose name begins with `#` hold numbers and are aligned to the right."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in columns:
        table.add_column(name.removeprefix("#"), justify="right" if name.startswith("#") else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell(value)) for value in row))
    console().print(table)


def show_list(
    found: Sequence[object],
    columns: Sequence[str],
    rows: Sequence[Sequence[object]],
    output: Format,
    *,
    projects: Sequence[str] = (),
) -> None:
    """Print what was found as JSON, or `rows` of it as a table.

    If `projects`, one for each row, are not all the same, they are the second column of the table.
    """
    if output is Format.JSON:
        show_json(found)
        return
    if len(set(projects)) > 1:
        columns = [*columns[:1], "project", *columns[1:]]
        rows = [[*row[:1], project, *row[1:]] for row, project in zip(rows, projects, strict=True)]
    show_table(columns, rows)


def show_result(value: object, remark: str, output: Format) -> None:
    """Print the result of a command as JSON, or else a remark about it."""
    if output is Format.JSON:
        show_json(value)
    else:
        note(remark)


def show_pairs(pairs: Mapping[str, object]) -> None:
    """Print names and values, one pair per line."""
    from rich.table import Table
    from rich.text import Text

    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column(overflow="fold")
    for name, value in pairs.items():
        grid.add_row(Text(name), Text(cell(value)))
    console().print(grid)


def show_registered(view: "BaseModel", output: Format) -> None:
    """Print what is registered with the coordinator under one name: as JSON, or one field per line."""
    if output is Format.JSON:
        show_json(view)
    else:
        show_pairs({key.replace("_", " ").replace("created at", "registered"): value for key, value in view})


def cell(value: object) -> str:
    """Format a value for people: None as a dash, times in UTC to the second.

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


def _escaped(document: str) -> str:
    """Escape what `json.dumps` leaves as it is, and a terminal may obey: DEL, C1 controls, marks of direction.

    >>> print(_escaped('"ü \\x7f \\x9b2J \\u202e"'))
    "ü \\u007f \\u009b2J \\u202e"
    """
    return "".join(char if char.isprintable() or char == "\n" else json.dumps(char)[1:-1] for char in document)


def duration(seconds: float) -> str:
    """Format seconds as minutes and seconds, with hours if there are any.

    >>> duration(65), duration(3700)
    ('1:05', '1:01:40')
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def size(num_bytes: float) -> str:
    """Format a number of bytes in the unit that suits it, of 1000 bytes and its multiples.

    >>> size(512), size(56_300), size(1_234_567_890)
    ('512 bytes', '56.3 kB', '1.2 GB')
    """
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= factor:
            return f"{num_bytes / factor:,.1f} {unit}"
    return f"{num_bytes:,.0f} bytes"


def _dumped(model: "BaseModel") -> Any:
    return finite(model.model_dump(mode="json"))
