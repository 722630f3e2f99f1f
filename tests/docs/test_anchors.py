"""Every link from a document to a section refers to an existing heading or anchor."""

import re
from pathlib import Path

import pytest

from support.documents import DOCUMENTS, ROOT

_LINK = re.compile(r"\]\((?!https?:|mailto:)([^)#\s]*)#([^)\s]+)\)")
_HEADING = re.compile(r"^#{1,6} (.+)$", re.MULTILINE)
_FENCE = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)


def anchors(path: Path) -> set[str]:
    """Return the names that GitHub gives a document's headings, and those that the document sets with <a id="...">."""
    text = _FENCE.sub("", path.read_text())
    named = set(re.findall(r'<a id="([^"]+)">', text))
    return named | {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in _HEADING.findall(text)}


def test_headings_get_the_names_that_github_gives_them() -> None:
    assert {"100000-clients", "connections-to-postgres"} <= anchors(ROOT / "docs" / "scaling.md")
    assert "what-is-kept-for-how-long" in anchors(ROOT / "docs" / "operations" / "storage.md")


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_every_link_to_a_section_has_a_target(path: Path) -> None:
    links = _LINK.findall(path.read_text())
    missing = [
        f"{target}#{name}" for target, name in links if name not in anchors((path.parent / target) if target else path)
    ]
    assert missing == []
