"""The examples in docstrings give the documented results."""

import doctest
import importlib
from pathlib import Path

import pytest

SOURCES = [*(Path(__file__).parents[2]).glob("shared/src"), *(Path(__file__).parents[2]).glob("services/*/src")]
MODULES = {
    ".".join(path.relative_to(source).with_suffix("").parts).removesuffix(".__init__")
    for source in SOURCES
    for path in source.rglob("*.py")
    if ">>> " in path.read_text()
}


@pytest.mark.parametrize("name", sorted(MODULES))
def test_the_doctests_of_a_module_pass(name: str) -> None:
    options = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    assert doctest.testmod(importlib.import_module(name), optionflags=options).failed == 0
