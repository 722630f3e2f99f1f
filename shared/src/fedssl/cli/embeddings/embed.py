"""`fedssl embed`: the representations of many images, in one file."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedssl.cli.arguments import (
    DataFolderOption,
    DeviceOption,
    EncoderThreadsOption,
    ImagesArgument,
    SplitOption,
    TokenFileOption,
    UrlOption,
)
from fedssl.cli.destinations import require_place
from fedssl.cli.embeddings.models import ModelOption, read_model
from fedssl.cli.machine import prepare
from fedssl.cli.output import Format, FormatOption, note, show_json, show_pairs
from fedssl.cli.progress_bar import progress_bar

if TYPE_CHECKING:
    from fedssl.embeddings.encoders import Model
    from fedssl.embeddings.sources import Source

RepresentationsOption = Annotated[
    Path, typer.Option("--out", "-o", metavar="FILE", help="The file to write: .parquet or .npz.", dir_okay=False)
]


def embed(
    images: ImagesArgument,
    *,
    model: ModelOption,
    out: RepresentationsOption,
    split: SplitOption = None,
    data_folder: DataFolderOption = None,
    device: DeviceOption = "cpu",
    threads: EncoderThreadsOption = 1,
    url: UrlOption = None,
    token_file: TokenFileOption = None,
    output: FormatOption = Format.TABLE,
) -> None:
    """Compute the representation of every image, and write them into one file with the images' paths.

    Example: `fedssl embed photos --model run-1a2b3c4d --out photos.parquet`

    \b
    FILE.parquet  columns path and embedding (float32, as long as the
                  encoder's output). Needs pip install 'fedssl[parquet]'
    FILE.npz      arrays paths and embeddings, for numpy.load

    Images are scaled and normalised as in `fedssl evaluate`. An image that cannot be decoded is left out, and
    named. The file's metadata have the digest of the encoder, the preprocessing, and where the images are.

    Memory does not grow with the number of images. If the command is interrupted, the same command continues: until
    FILE is complete, the work so far is in the folder FILE.partial. Nothing is sent anywhere; if MODEL is a run's id,
    its weights are fetched from the coordinator.

    `fedssl search`, `duplicates` and `outliers` read the file.
    """
    require_place("--out", out)
    machine = prepare(device, threads, data_folder, set())
    from fedssl.embeddings.sources import open_source

    source = open_source(images, split, machine.data_root)
    encoder, name = read_model(model, url, token_file)
    write_representations(source, encoder, name, out, device, output)


def write_representations(
    source: "Source", encoder: "Model", name: str, out: Path, device: str, output: Format
) -> None:
    """Write the file of representations, and show what is in it. `name` is how the encoder is found again."""
    from fedssl.embeddings.embed import embed as write

    try:
        with progress_bar("embedding", len(source), suffix=" images") as update:
            found = write(source, encoder, name, out, device=device, on_progress=update)
    except KeyboardInterrupt:
        note(f"interrupted: {out}.partial has the work so far, and the same command continues it")
        raise
    about, left_out = found.about, found.about["left_out"]
    for each in left_out["first"]:
        note(f"left out {each['path']}: {each['reason']}")
    if output is Format.JSON:
        show_json({"file": str(out), "not_read": source.left_out(), "num_before": found.num_before, **about})
        return
    show_pairs(
        {
            "file": str(out),
            "embedded": f"{about['num_embedded']:,} of {len(source):,} images, {found.num_before:,} of them before",
            "left out": f"{left_out['num']:,} that cannot be decoded" if left_out["num"] else None,
            "not read": source.left_out() or None,
            "encoder": f"{about['encoder']['network']}, width {about['encoder']['width']}",
            "sha256": about["encoder"]["sha256"],
        }
    )
