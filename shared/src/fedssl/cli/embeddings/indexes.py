"""The options, thumbnails and page that `search`, `duplicates` and `outliers` share."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedssl.cli.output import note
from fedssl.errors import DataError

if TYPE_CHECKING:
    from PIL.Image import Image

    from fedssl.embeddings.page import Section, Thumbnail

IndexOption = Annotated[
    Path, typer.Option("--index", metavar="FILE", help="A file that `fedssl embed` wrote.", dir_okay=False)
]
ImagesOption = Annotated[
    str | None,
    typer.Option(
        metavar="IMAGES", help="Where the images of the index are now.  [default: where `fedssl embed` read them]"
    ),
]
PageOption = Annotated[Path, typer.Option("--out", "-o", metavar="HTML", help="The page to write.", dir_okay=False)]


def thumbnails_of(about: dict[str, Any], images: str | None, root: Path | None) -> "Thumbnail":
    """Return a function that makes thumbnails. If the images are not there, it makes none, and a note reports it."""
    from fedssl.embeddings.sources import reopen_source

    try:
        return reopen_source(images or str(about["images"].get("from")), about["images"].get("split"), root).thumbnail
    except DataError as error:
        note(f"the page has no pictures, because the images are not there: {error}; --images names their folder")
        return partial(_no_thumbnail, error)


def show_page(out: Path, title: str, facts: Sequence[str], sections: "Sequence[Section]") -> None:
    """Write the page, and report where it is."""
    from fedssl.embeddings.page import write_page

    write_page(out, title, facts, sections)
    note(f"{out}: open it in a browser")


def _no_thumbnail(error: DataError, name: str, side: int) -> "Image":
    raise error
