"""`fedssl outliers`: the images of an index that are like no other."""

from pathlib import Path
from typing import Annotated

import typer

from fedssl.cli.arguments import DataFolderOption, DeviceOption
from fedssl.cli.destinations import require_place
from fedssl.cli.embeddings.indexes import ImagesOption, IndexOption, PageOption, show_page, thumbnails_of
from fedssl.cli.machine import prepare
from fedssl.cli.output import Format, FormatOption, show_json, show_table


def outliers(
    *,
    index: IndexOption,
    num: Annotated[int, typer.Option(min=1, max=1000, help="Number of images to show.")] = 50,
    neighbours: Annotated[
        int, typer.Option(min=1, metavar="K", help="Rank images by the cosine to their K-th nearest image.")
    ] = 10,
    images: ImagesOption = None,
    out: PageOption = Path("outliers.html"),
    data_folder: DataFolderOption = None,
    device: DeviceOption = "cpu",
    output: FormatOption = Format.TABLE,
) -> None:
    """Find outliers: the images whose representations are farthest from those of all others.

    Example: `fedssl outliers --index photos.parquet`

    Images are ranked by the cosine similarity to their K-th nearest image, the smallest first (Sun et al. 2022). A
    larger K also finds small groups of images that are only like each other. The first images are not necessarily
    wrong: look at the page. Every pair is compared, so four times as many images take sixteen times as long.
    """
    machine = prepare(device, 1, data_folder, set())
    require_place("--out", out)
    from fedssl.embeddings.index_file import read_index
    from fedssl.embeddings.page import Section, Shown
    from fedssl.embeddings.similarity import find_outliers

    found = read_index(index)
    counting = min(neighbours, len(found.paths) - 1)
    rows = [
        (found.paths[each.position], each.cosine)
        for each in find_outliers(found.representations, neighbours, num, device)
    ]
    thumbnail = thumbnails_of(found.about, images, machine.data_root)
    shown = [Shown(path, f"{rank}: cosine {cosine:.4f}", thumbnail) for rank, (path, cosine) in enumerate(rows, 1)]
    facts = [
        f"The {len(rows)} of {len(found.paths):,} images in {index} with the smallest cosine to the image that is "
        f"number {counting} of their nearest ones."
    ]
    show_page(out, "Outliers", facts, [Section("Most unusual first", shown)])
    if output is Format.JSON:
        listed = [{"path": path, "cosine": cosine} for path, cosine in rows]
        show_json({"index": str(index), "neighbours": counting, "outliers": listed, "page": str(out)})
    else:
        show_table(["#rank", "#cosine", "image"], [(rank, cosine, path) for rank, (path, cosine) in enumerate(rows, 1)])
