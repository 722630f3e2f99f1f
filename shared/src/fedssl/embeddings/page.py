"""One HTML file of images with captions. It needs no other file, runs no script and loads nothing."""

import base64
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from PIL import Image

from fedssl.errors import DataError
from fedssl.files import write_atomically

SIDE = 160
"""The largest height and width of a thumbnail, in pixels."""

MAX_IMAGES = 1000
"""The largest number of images on a page, which bounds its size."""

_STYLE = """
:root { color-scheme: light dark; font: 15px/1.4 system-ui, sans-serif }
body { margin: 2rem auto; max-width: 75rem; padding: 0 1rem }
section { border-top: 1px solid #8884; margin-top: 1.5rem }
h2 { font-size: 1rem }
ul { display: flex; flex-wrap: wrap; gap: 1rem; list-style: none; padding: 0 }
figure { margin: 0; width: 160px }
img, .none { align-items: center; background: #8882; display: flex; height: 160px; object-fit: contain; width: 160px }
.none { justify-content: center; text-align: center }
figcaption { font-size: .8rem; overflow-wrap: anywhere }
table { border-collapse: collapse }
th, td { overflow-wrap: anywhere; padding: .1rem 1rem .1rem 0; text-align: left; vertical-align: top }
.bar { min-width: 15rem }
.bar div { background: #0072b2; height: .8em }
"""

Thumbnail = Callable[[str, int], Image.Image]
"""Returns the image of this name with at most so many pixels in height and width. Raises DataError."""


@dataclass(frozen=True, slots=True)
class Shown:
    """An image on the page: its name, its caption, and what makes its picture."""

    name: str
    caption: str
    thumbnail: Thumbnail


@dataclass(frozen=True, slots=True)
class Section:
    """Images below one heading."""

    heading: str
    images: Sequence[Shown]


@dataclass(frozen=True, slots=True)
class Bar:
    """A cell of a table that is drawn as a bar of this length, 0..1."""

    length: float


@dataclass(frozen=True, slots=True)
class Table:
    """A table below one heading; each row has a cell per column."""

    heading: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str | Bar]]


def write_page(
    path: Path, title: str, about: Sequence[str], sections: Sequence[Section], tables: Sequence[Table] = ()
) -> None:
    """Write the page. `about` are paragraphs below the title, and `tables` come next. Text is escaped.

    An image that cannot be decoded is shown by its name. No more than MAX_IMAGES are shown.
    """
    parts = [
        '<!doctype html>\n<html lang="en">\n<meta charset="utf-8">\n',
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; img-src data:; '
        "style-src 'unsafe-inline'\">\n",
        '<meta name="viewport" content="width=device-width">\n',
        f"<title>{escape(title)}</title>\n<style>{_STYLE}</style>\n<h1>{escape(title)}</h1>\n",
        *(f"<p>{escape(text)}</p>\n" for text in about),
    ]
    parts += map(_table, tables)
    left = MAX_IMAGES
    for section in sections:
        if left <= 0:
            break
        images = "".join(_figure(shown) for shown in section.images[:left])
        left -= len(section.images)
        parts.append(f"<section>\n<h2>{escape(section.heading)}</h2>\n<ul>\n{images}</ul>\n</section>\n")
    path.parent.mkdir(parents=True, exist_ok=True)
    # A file name that is not UTF-8 has characters that cannot be encoded.
    write_atomically(path, "".join(parts).encode(errors="replace"), durable=False)


def _table(table: Table) -> str:
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in table.columns)
    rows = "".join(f"<tr>{''.join(map(_cell, row))}</tr>\n" for row in table.rows)
    return f"<section>\n<h2>{escape(table.heading)}</h2>\n<table>\n<tr>{head}</tr>\n{rows}</table>\n</section>\n"


def _cell(cell: str | Bar) -> str:
    if isinstance(cell, Bar):
        return f'<td class="bar"><div style="width:{100 * cell.length:.1f}%"></div></td>'
    return f"<td>{escape(cell)}</td>"


def _figure(shown: Shown) -> str:
    name = escape(shown.name)
    return f"<li><figure>{_picture(shown)}<figcaption>{escape(shown.caption)}<br>{name}</figcaption></figure></li>\n"


def _picture(shown: Shown) -> str:
    try:
        picture = shown.thumbnail(shown.name, SIDE)
    except DataError:
        return '<div class="none">cannot be read</div>'
    data = io.BytesIO()
    picture.save(data, "JPEG", quality=80)
    encoded = base64.b64encode(data.getvalue()).decode()
    return f'<img alt="" src="data:image/jpeg;base64,{encoded}">'
