"""`fedssl search`: the images of an index that are most like a given one."""

from pathlib import Path
from typing import Annotated

import typer

from fedssl.cli.arguments import DataFolderOption, DeviceOption, TokenFileOption, UrlOption
from fedssl.cli.destinations import require_place
from fedssl.cli.embeddings.indexes import ImagesOption, IndexOption, PageOption, show_page, thumbnails_of
from fedssl.cli.embeddings.models import read_model
from fedssl.cli.errors import UsageError
from fedssl.cli.machine import prepare
from fedssl.cli.output import Format, FormatOption, show_json, show_table


def search(
    image: Annotated[Path, typer.Argument(metavar="IMAGE", help="An image file.", dir_okay=False)],
    *,
    index: IndexOption,
    num: Annotated[int, typer.Option(min=1, max=999, help="Number of images to find.")] = 20,
    model: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL", help="The encoder of the index: a folder, or a run's id.  [default: as given to `embed`]"
        ),
    ] = None,
    images: ImagesOption = None,
    out: PageOption = Path("neighbours.html"),
    data_folder: DataFolderOption = None,
    device: DeviceOption = "cpu",
    url: UrlOption = None,
    token_file: TokenFileOption = None,
    output: FormatOption = Format.TABLE,
) -> None:
    """Find the images of an index that are most like IMAGE, by the cosine of their representations.

    Example: `fedssl search new.png --index photos.parquet`

    Prints the nearest images, and shows them on one HTML page that contains small versions of them and needs no other
    file. IMAGE is embedded by the encoder of the index; another encoder is refused, because its representations cannot
    be compared with those of the index.
    """
    machine = prepare(device, 1, data_folder, set())
    require_place("--out", out)
    from fedssl.embeddings.encoders import represent_file
    from fedssl.embeddings.identity import difference
    from fedssl.embeddings.index_file import read_index
    from fedssl.embeddings.page import Section, Shown
    from fedssl.embeddings.similarity import find_nearest
    from fedssl.embeddings.sources import folder_source

    found = read_index(index)
    encoder, _ = read_model(model or str(found.about.get("model")), url, token_file)
    if different := difference(found.about, encoder.identity()):
        raise UsageError(
            f"{index} holds representations of {different}: give its encoder with --model, or make a new index"
        )
    neighbours = find_nearest(found.representations, represent_file(encoder, image, device), num)
    rows = [(found.paths[each.position], each.cosine) for each in neighbours]
    query = Shown(image.name, "the query", folder_source(image.parent).thumbnail)
    thumbnail = thumbnails_of(found.about, images, machine.data_root)
    shown = [Shown(path, f"{rank}: cosine {cosine:.4f}", thumbnail) for rank, (path, cosine) in enumerate(rows, 1)]
    facts = [f"The {len(rows)} most similar of {len(found.paths):,} images in {index}."]
    show_page(out, f"Images like {image.name}", facts, [Section("Query", [query]), Section("Nearest images", shown)])
    if output is Format.JSON:
        listed = [{"path": path, "cosine": cosine} for path, cosine in rows]
        show_json({"image": str(image), "index": str(index), "neighbours": listed, "page": str(out)})
    else:
        show_table(["#rank", "#cosine", "image"], [(rank, cosine, path) for rank, (path, cosine) in enumerate(rows, 1)])
