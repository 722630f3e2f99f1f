"""The page is one file without scripts, and every text in it is escaped."""

import base64
import io
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
from PIL import Image

from fedssl.embeddings import page
from fedssl.embeddings.page import MAX_IMAGES, Section, Shown, write_page
from fedssl.errors import DataError


def noise(name: str, side: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, (side, side, 3)).astype(np.uint8))


def gone(name: str, side: int) -> Image.Image:
    raise DataError("it is gone")


class Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data


def test_names_and_titles_are_escaped(tmp_path: Path) -> None:
    evil = "<script>alert(1)</script>\"'&.png"
    write_page(tmp_path / "a.html", evil, [evil], [Section(evil, [Shown(evil, evil, noise), Shown(evil, "", gone)])])
    tags = Tags()
    tags.feed((tmp_path / "a.html").read_text(encoding="utf-8"))
    assert {tag for tag, _ in tags.found}.isdisjoint({"script", "link", "iframe", "a"})
    assert tags.text.count(evil) >= 6
    sources = [attrs["src"] for tag, attrs in tags.found if tag == "img"]
    assert len(sources) == 1
    assert "cannot be read" in tags.text
    picture = Image.open(io.BytesIO(base64.b64decode(str(sources[0]).removeprefix("data:image/jpeg;base64,"))))
    assert picture.size == (page.SIDE, page.SIDE)


def test_nothing_is_loaded_from_other_files_or_servers(tmp_path: Path) -> None:
    write_page(tmp_path / "a.html", "title", [], [Section("one", [Shown("a.png", "", noise)])])
    text = (tmp_path / "a.html").read_text(encoding="utf-8")
    assert "default-src 'none'; img-src data:" in text
    assert not re.search(r"(src|href)=\"(?!data:)|url\(|@import|http:|https:", text)


def test_the_size_is_limited_for_any_number_of_images(tmp_path: Path) -> None:
    shown = [Shown("a.png", "", noise)] * MAX_IMAGES
    write_page(tmp_path / "a.html", "title", [], [Section("one", shown), Section("two", shown)])
    text = (tmp_path / "a.html").read_text(encoding="utf-8")
    assert text.count("<img ") == MAX_IMAGES
    assert "two" not in text
    assert len(text) < 40e6


def test_a_file_name_that_is_not_utf8_is_shown_with_a_question_mark(tmp_path: Path) -> None:
    name = b"scan-\xff.png".decode(errors="surrogateescape")
    write_page(tmp_path / "a.html", name, [], [Section("one", [Shown(name, "", noise)])])
    assert "<h1>scan-?.png</h1>" in (tmp_path / "a.html").read_text(encoding="utf-8")
