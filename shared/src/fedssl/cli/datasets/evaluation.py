"""`fedssl evaluation-dataset`: labelled images on the coordinator, to evaluate encoders on while a run trains."""

from typing import Annotated

import typer

from fedssl.cli.arguments import ProjectOption, TokenFileOption, UrlOption, check_name
from fedssl.cli.connection.choice import CONNECTION_HINT
from fedssl.cli.connection.connect import connect
from fedssl.cli.datasets.fetching import data_folder, ensure
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
from fedssl.cli.output import Format, FormatOption, note, show_list, show_registered, show_result
from fedssl.cli.progress_bar import progress_bar

app = typer.Typer(
    help="Register labelled images to evaluate encoders on. They stay on the coordinator: no worker can fetch them.\n\n"
    "Example: `fedssl evaluation-dataset add held-out folder-of-images --max-test 2000`",
    epilog=CONNECTION_HINT,
    no_args_is_help=True,
)


@app.command(epilog=f"A run uses the images if its spec has `dataset = NAME` under [evaluation]. {REGISTRATION_HELP}")
def add(
    name: NameArgument,
    source: SourceArgument,
    *,
    image_size: ImageSizeOption = None,
    channels: ChannelsOption = None,
    max_train: Annotated[
        int | None,
        typer.Option(min=2, help="Register at most this many training images, chosen by --seed.  [default: all]"),
    ] = None,
    max_test: Annotated[
        int | None,
        typer.Option(min=2, help="Register at most this many test images, chosen by --seed.  [default: all]"),
    ] = None,
    seed: SeedOption = 0,
    project: ProjectOption = None,
    url: UrlOption = None,
    token_file: TokenFileOption = None,
    output: FormatOption = Format.TABLE,
) -> None:
    """Register a labelled data set with a training and a test split."""
    check_name(name)
    from fedssl.data.dataset_files import ImageSelection, registered_shape, write_labelled
    from fedssl.data.datasets import require_whole_groups

    with connect(url, token_file, patience_seconds=30) as client, temporary_file() as file:
        next(client.evaluation_datasets(), None)  # report a wrong token before the images are read
        ensure(source, note)
        require_whole_groups(source, data_folder())
        train = read_split(source, "train", image_size, check_channels(channels))
        shape = registered_shape(train, image_size, check_channels(channels))
        test = read_split(source, "test", shape[1], shape[0])
        total = min(len(train), max_train or len(train)) + min(len(test), max_test or len(test))
        with progress_bar("writing", total, suffix=" images") as written:
            write_labelled(
                train, test, file, shape, (ImageSelection(max_train, seed), ImageSelection(max_test, seed)), written
            )
        with progress_bar("sending", file.stat().st_size, 1e6, " MB") as sent:
            view = client.add_evaluation_dataset(name, file, project=project, on_bytes=sent)
    images = f"{view.num_train:,} training and {view.num_test:,} test images of {view.num_classes} classes"
    show_result(view, f"{view.name} is registered: {images}, digest {view.digest}", output)


@app.command("ls")
def list_evaluation_datasets(
    url: UrlOption = None, token_file: TokenFileOption = None, output: FormatOption = Format.TABLE
) -> None:
    """List the evaluation data sets."""
    with connect(url, token_file) as client:
        found = list(client.evaluation_datasets())
    rows = [
        (view.name, view.num_train, view.num_test, view.num_classes, view.channels, view.image_size, view.digest[:12],
         view.created_at)
        for view in found
    ]  # fmt: skip
    columns = ["name", "#train", "#test", "#classes", "#channels", "#size", "digest", "registered"]
    show_list(found, columns, rows, output, projects=[view.project for view in found])


@app.command()
def show(
    name: NameArgument, url: UrlOption = None, token_file: TokenFileOption = None, output: FormatOption = Format.TABLE
) -> None:
    """Show one evaluation data set."""
    with connect(url, token_file) as client:
        show_registered(client.evaluation_dataset(name), output)
