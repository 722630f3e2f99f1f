"""The tests that docs/security.md lists exist."""

import ast
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
SECTION = (TESTS.parent / "docs/security.md").read_text().partition("## What is tested, and where")[2]
ROWS = dict(re.findall(r"^\| (.+?) \| (`.+) \|$", SECTION, re.MULTILINE))


def _named(cell: str) -> list[tuple[str, str]]:
    """Return each test's file and function from a cell: `file.py`: `test_one`, `test_two`; `file.py`: `test_three`."""
    found = []
    for part in cell.split("; "):
        file, *functions = re.findall(r"`([^`]+)`", part)
        found += [(file, function) for function in functions]
    return found


def test_the_table_has_rows() -> None:
    assert len(ROWS) > 20


@pytest.mark.parametrize("promise", ROWS)
def test_every_listed_test_exists(promise: str) -> None:
    named = _named(ROWS[promise])
    assert named
    for file, function in named:
        body = ast.parse((TESTS / file).read_text()).body
        assert function in {node.name for node in body if isinstance(node, ast.FunctionDef)}, f"{file}: {function}"
