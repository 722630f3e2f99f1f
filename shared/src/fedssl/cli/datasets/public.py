"""`fedssl public-dataset`: images that everybody in a run may hold, registered once with the coordinator."""

from typing import Annotated, Literal

import typer

from fedssl.cli.connection.target import CONNECTION_HELP, TokenFileOption, UrlOption, connect
from fedssl.cli.datasets.registration import (
    ChannelsOption,
    ImageSizeOption,
    NameArgument,
    SeedOption,
    SourceArgument,
    channels_of,
    check_name,
    read_split,
    temporary_file,
)
from fedssl.cli.errors import UsageError
from fedssl.cli.output import Format, FormatOption, note, show_json, show_pairs, show_table
from fedssl.cli.progress_bar import showing

app = typer.Typer(
    help="Register public images (FLESD, FedCA): workers fetch them from the coordinator by their digest.",
    epilog=CONNECTION_HELP,
    no_args_is_help=True,
)

_EPILOG = (
    "A run names them in its spec, [public_data] dataset = NAME. The same images under the same name again are no "
    "error; other images under that name are refused. The images are written to a temporary file first (TMPDIR says "
    "where), and only what the coordinator lacks is sent."
)


@app.command(epilog=_EPILOG)
def add(
    name: NameArgument,
    source: SourceArgument,
    *,
    split: Annotated[Literal["train", "test"], typer.Option(help="Which of the source's splits.")] = "train",
    image_size: ImageSizeOption = None,
    channels: ChannelsOption = None,
    max_images: Annotated[
        int | None, typer.Option(min=2, help="Register at most so many, drawn by --seed.  [default: all]")
    ] = None,
    seed: SeedOption = 0,
    url: UrlOption = None,
    token_file: TokenFileOption = None,
    output: FormatOption = Format.TABLE,
) -> None:
    """Register public images. Labels are left out: whoever takes part in a run that names them may see the images."""
    check_name(name)
    _check_known_name(name, source, is_whole=(image_size, channels, max_images) == (None, None, None))
    from fedssl.image_files import Choice, own_shape, write_public

    with connect(url, token_file, patience_seconds=30) as client, temporary_file() as file:
        next(client.public_datasets(), None)  # a wrong token is told before the images are read
        images = read_split(source, split, image_size, channels_of(channels))
        shape = own_shape(images, image_size, channels_of(channels))
        with showing("writing", min(len(images), max_images or len(images)), suffix=" images") as written:
            write_public(images, file, shape, Choice(max_images, seed), written)
        with showing("sending", file.stat().st_size, 1e6, " MB") as sent:
            view = client.add_public_dataset(name, file, split=split, on_bytes=sent)
    if output is Format.JSON:
        show_json(view)
    else:
        note(f"{view.name} is registered: {view.num_images:,} images, digest {view.digest}")


@app.command("ls")
def list_public_datasets(
    url: UrlOption = None, token_file: TokenFileOption = None, output: FormatOption = Format.TABLE
) -> None:
    """List public data sets."""
    with connect(url, token_file) as client:
        found = list(client.public_datasets())
    if output is Format.JSON:
        show_json(found)
        return
    rows = [
        (view.name, view.split, view.num_images, view.channels, view.image_size, view.digest[:12], view.created_at)
        for view in found
    ]
    show_table(["name", "split", "#images", "#channels", "#size", "digest", "registered"], rows)


@app.command()
def show(
    name: NameArgument, url: UrlOption = None, token_file: TokenFileOption = None, output: FormatOption = Format.TABLE
) -> None:
    """Show one public data set."""
    with connect(url, token_file) as client:
        view = client.public_dataset(name)
    if output is Format.JSON:
        show_json(view)
    else:
        show_pairs({key.replace("_", " ").replace("created at", "registered"): value for key, value in view})


def _check_known_name(name: str, source: str, *, is_whole: bool) -> None:
    """A known data set's name means the same images everywhere, in a simulation too."""
    from fedssl.protocol.data import KNOWN_DATASETS

    if name in KNOWN_DATASETS and not (source == name and is_whole):
        raise UsageError(
            f"{name} is a known data set: under its own name only the whole of it can be registered, as it is "
            f"(fedssl public-dataset add {name} {name}); choose another name for these images"
        )
