"""`fedssl public-dataset`: images that all workers of a run may fetch, registered once with the coordinator."""

from typing import Annotated, Literal

import typer

from fedssl.cli.arguments import ProjectOption, TokenFileOption, UrlOption, check_name
from fedssl.cli.connection.choice import CONNECTION_HINT
from fedssl.cli.connection.connect import connect
from fedssl.cli.datasets.registration import (
    REGISTRATION_HELP,
    ChannelsOption,
    ImageSizeOption,
    NameArgument,
    SeedOption,
    SourceArgument,
    check_channels,
    read_split,
    temporary_file,
)
from fedssl.cli.errors import UsageError
from fedssl.cli.output import Format, FormatOption, show_list, show_registered, show_result
from fedssl.cli.progress_bar import progress_bar
from fedssl.protocol.data import KNOWN_DATASETS

app = typer.Typer(
    help="Register public images (FLESD, FedCA), which workers fetch from the coordinator by their digest.\n\n"
    "Example: `fedssl public-dataset add public folder-of-images --max-images 5000`",
    epilog=CONNECTION_HINT,
    no_args_is_help=True,
)


@app.command(epilog=f"A run uses the images if its spec has `dataset = NAME` under [public_data]. {REGISTRATION_HELP}")
def add(
    name: NameArgument,
    source: SourceArgument,
    *,
    split: Annotated[Literal["train", "test"], typer.Option(help="Which split of the source to register.")] = "train",
    image_size: ImageSizeOption = None,
    channels: ChannelsOption = None,
    max_images: Annotated[
        int | None, typer.Option(min=2, help="Register at most this many images, chosen by --seed.  [default: all]")
    ] = None,
    seed: SeedOption = 0,
    project: ProjectOption = None,
    url: UrlOption = None,
    token_file: TokenFileOption = None,
    output: FormatOption = Format.TABLE,
) -> None:
    """Register public images, without labels. All workers of a run that uses them can see the images."""
    check_name(name)
    _check_known_name(name, source, is_whole=(image_size, channels, max_images) == (None, None, None))
    from fedssl.data.dataset_files import ImageSelection, registered_shape, write_public

    with connect(url, token_file, patience_seconds=30) as client, temporary_file() as file:
        next(client.public_datasets(), None)  # report a wrong token before the images are read
        images = read_split(source, split, image_size, check_channels(channels))
        shape = registered_shape(images, image_size, check_channels(channels))
        with progress_bar("writing", min(len(images), max_images or len(images)), suffix=" images") as written:
            write_public(images, file, shape, ImageSelection(max_images, seed), written)
        with progress_bar("sending", file.stat().st_size, 1e6, " MB") as sent:
            view = client.add_public_dataset(name, file, split=split, project=project, on_bytes=sent)
    show_result(view, f"{view.name} is registered: {view.num_images:,} images, digest {view.digest}", output)


@app.command("ls")
def list_public_datasets(
    url: UrlOption = None, token_file: TokenFileOption = None, output: FormatOption = Format.TABLE
) -> None:
    """List the public data sets."""
    with connect(url, token_file) as client:
        found = list(client.public_datasets())
    rows = [
        (view.name, view.split, view.num_images, view.channels, view.image_size, view.digest[:12], view.created_at)
        for view in found
    ]
    columns = ["name", "split", "#images", "#channels", "#size", "digest", "registered"]
    show_list(found, columns, rows, output, projects=[view.project for view in found])


@app.command()
def show(
    name: NameArgument, url: UrlOption = None, token_file: TokenFileOption = None, output: FormatOption = Format.TABLE
) -> None:
    """Show one public data set."""
    with connect(url, token_file) as client:
        show_registered(client.public_dataset(name), output)


def _check_known_name(name: str, source: str, *, is_whole: bool) -> None:
    """Raise UsageError if a known name would mean other images here than everywhere else, simulations included."""
    if name in KNOWN_DATASETS and not (source == name and is_whole):
        raise UsageError(
            f"{name} is a known data set: only the whole of it, unchanged, can be registered under its name "
            f"(fedssl public-dataset add {name} {name}); choose another name for these images"
        )
