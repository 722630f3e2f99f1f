"""`fedssl data`: the data sets on this machine."""

from pathlib import Path
from typing import Annotated

import typer

from fedssl.cli.arguments import SetOption
from fedssl.cli.output import Format, FormatOption

app = typer.Typer(
    help="List the data sets on this machine, download more, and check images.\n\nExample: `fedssl data fetch cifar10`",
    no_args_is_help=True,
)


@app.command("ls")
def list_datasets(output: FormatOption = Format.TABLE) -> None:
    """List the known data sets: what they are, and where they are on this machine or how to get them.

    They are searched for in the folder of downloaded data sets, in the folder FEDSSL_DATA, and in /usr/share/datasets.
    """
    from fedssl.cli.datasets.known import show_known

    show_known(output)


@app.command("check")
def check(
    data: Annotated[str, typer.Argument(metavar="FOLDER", help="A folder of image files, or a known set of them.")],
    spec: Annotated[
        str | None, typer.Option(metavar="SPEC", help="Estimate memory and cache for this run's [data].")
    ] = None,
    set_: SetOption = None,
    sample: Annotated[
        int | None, typer.Option(min=1, help="Decode only this number of images, spread evenly.  [default: all]")
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", metavar="HTML", help="Write a page too.")] = None,
    output: FormatOption = Format.TABLE,
) -> None:
    """Report what a folder of images holds: it decodes every image, and changes nothing.

    Example: `fedssl data check images --out check.html`

    The report has the numbers of images, sizes, channels and bits, classes and patients, how often values occur, what
    cannot be read and why, images of one value, images that equal an earlier one, and the memory or cache that a worker
    needs. Exits with 1 if more images are unreadable than `max_unreadable` of the spec (1 %) allows.
    """
    from fedssl.cli.datasets.check import check_data

    check_data(data, spec, set_, sample, out, output)


@app.command("views")
def views(
    data: Annotated[
        str, typer.Argument(metavar="FOLDER", help="A folder of image files, an .npz file or a known data set.")
    ],
    spec: Annotated[str, typer.Option(metavar="SPEC", help="The run whose [data] makes the views.")],
    set_: SetOption = None,
    out: Annotated[
        Path, typer.Option("--out", "-o", metavar="PNG", help="The picture to write.", dir_okay=False)
    ] = Path("views.png"),
    num_images: Annotated[int, typer.Option("--images", min=1, max=64, help="Number of images, one per row.")] = 8,
    num_views: Annotated[int, typer.Option("--views", min=1, max=32, help="Number of random views per image.")] = 8,
    seed: Annotated[int, typer.Option(min=0, help="The seed of the views.")] = 0,
) -> None:
    """Draw what the network sees of some images: in each row the prepared image, then random views of it.

    Example: `fedssl data views images --spec run.toml --out views.png`

    The window, the cache's crops from whole images and the augmentation are those of the spec. Mean and deviation are
    not applied, because values below 0 cannot be drawn. Images of more than three channels show their first three.
    """
    from fedssl.cli.datasets.views import draw_views

    draw_views(data, spec, set_, out, num_images, num_views, seed)


@app.command("fetch")
def fetch(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A data set from `fedssl data ls`.")],
    output: FormatOption = Format.TABLE,
) -> None:
    """Download a data set from its authors' server and check it against the published checksums.

    Does nothing if the data set is here already. It is kept in ~/.cache/fedssl (or $XDG_CACHE_HOME/fedssl), where all
    commands of this user find it.
    """
    from fedssl.cli.datasets.known import fetch_known

    fetch_known(name, output)
