"""`fedssl data`: the data sets on this machine."""

from typing import Annotated

import typer

from fedssl.cli.output import Format, FormatOption

app = typer.Typer(
    help="List the data sets on this machine, and download more.\n\nExample: `fedssl data fetch cifar10`",
    no_args_is_help=True,
)


@app.command("ls")
def list_datasets(output: FormatOption = Format.TABLE) -> None:
    """List the known data sets: what they are, and where they are on this machine or how to get them.

    They are searched for in the folder of downloaded data sets, in the folder FEDSSL_DATA, and in /usr/share/datasets.
    """
    from fedssl.cli.datasets.known import show_known

    show_known(output)


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
