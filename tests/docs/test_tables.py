"""Tables of the documents are tables: with empty lines around them, a separator, and rows of one width."""

import itertools
import re
from pathlib import Path

import pytest

from support.documents import DOCUMENTS, ROOT

_FENCE = re.compile(r"^ *```.*?^ *```", re.DOTALL | re.MULTILINE)
_CODE = re.compile(r"`[^`]*`")


def _cells(line: str) -> int:
    return _CODE.sub("", line).replace(r"\|", "").count("|") - 1


def mistakes(text: str) -> list[str]:
    """Return the lines at which a Markdown text has a broken table, which pages then show as text."""
    found = []
    groups = itertools.groupby(_FENCE.sub("", text).splitlines(), key=lambda line: line.lstrip().startswith("|"))
    before = ""
    for is_table, group in groups:
        lines = list(group)
        if is_table:
            found += [before] if before.strip() else []
            found += (
                []
                if re.fullmatch(r" *\|(:?-+:?\|)+", "".join(lines[1:2]).replace("| ", "|").replace(" |", "|"))
                else lines[:1]
            )
            found += [line for line in lines if _cells(line) != _cells(lines[0])]
            found += [line for line, next_one in itertools.pairwise(lines) if line == next_one]
        elif before.lstrip().startswith("|") and lines[0].strip():
            found.append(lines[0])
        before = lines[-1]
    return found


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_every_table_is_well_formed(path: Path) -> None:
    assert mistakes(path.read_text()) == []


@pytest.mark.parametrize(
    "text",
    [
        "text\n| a |\n|---|\n| 1 |",
        "| a |\n|---|\n| 1 |\ntext",
        "| a |\n| 1 |",
        "| a |\n|---|\n| 1 | 2 |",
        "| a |\n|---|\n| 1 |\n| 1 |",
    ],
    ids=["text before", "text after", "no separator", "another width", "a row twice"],
)
def test_a_broken_table_is_found(text: str) -> None:
    assert mistakes(text)
    assert not mistakes("text\n\n| a | b |\n|---|--:|\n| 1 | `x|y` |\n\ntext")
