"""`fedssl duplicates`: near-duplicates among the images of an index."""

from pathlib import Path
from typing import Annotated

import typer

from fedssl.cli.arguments import DataFolderOption, DeviceOption
from fedssl.cli.destinations import require_place
from fedssl.cli.embeddings.indexes import ImagesOption, IndexOption, PageOption, show_page, thumbnails_of
from fedssl.cli.machine import prepare
from fedssl.cli.output import Format, FormatOption, note, show_json, show_table
from fedssl.wording import plural


def duplicates(
    *,
    index: IndexOption,
    threshold: Annotated[
        float, typer.Option(min=-1, max=1, help="The smallest cosine similarity of near-duplicates.")
    ] = 0.999,
    max_pairs: Annotated[int, typer.Option(min=1, max=500, help="Show at most this many pairs.")] = 200,
    images: ImagesOption = None,
    out: PageOption = Path("duplicates.html"),
    data_folder: DataFolderOption = None,
    device: DeviceOption = "cpu",
    output: FormatOption = Format.TABLE,
) -> None:
    """Find near-duplicates: groups of images with almost the same representation.

    Example: `fedssl duplicates --index photos.parquet`

    Pairs of images with a cosine similarity of at least the threshold are joined to groups, the most similar pairs
    first. Which threshold separates duplicates from images that are only alike depends on the encoder: begin with the
    default, and look at the page. Every pair is compared, so four times as many images take sixteen times as long.

    Nothing is removed. `--format json` lists the paths of each group for a script that does.
    """
    machine = prepare(device, 1, data_folder, set())
    require_place("--out", out)
    from fedssl.embeddings.index_file import read_index
    from fedssl.embeddings.page import Section, Shown
    from fedssl.embeddings.similarity import find_duplicates

    found = read_index(index)
    result = find_duplicates(found.representations, threshold, max_pairs, device)
    groups = [([found.paths[position] for position in group.positions], group.cosine) for group in result.groups]
    thumbnail = thumbnails_of(found.about, images, machine.data_root)
    sections = [
        Section(f"Group {number}: cosine {cosine:.4f} or more", [Shown(path, "", thumbnail) for path in paths])
        for number, (paths, cosine) in enumerate(groups, 1)
    ]
    left = f" The {max_pairs} most similar ones are shown." if result.num_pairs > max_pairs else ""
    fact = (
        f"{plural(result.num_pairs, 'pair')} of the {len(found.paths):,} images in {index}, each with a cosine of "
        f"{threshold} or more.{left}"
    )
    show_page(out, "Near-duplicates", [fact], sections)
    if output is Format.JSON:
        listed = [{"paths": paths, "cosine": cosine} for paths, cosine in groups]
        show_json({"index": str(index), "num_pairs": result.num_pairs, "groups": listed, "page": str(out)})
        return
    note(fact)
    rows = [(number, cosine, path) for number, (paths, cosine) in enumerate(groups, 1) for path in paths]
    show_table(["#group", "#cosine", "image"], rows)
