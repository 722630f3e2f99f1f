"""`fedssl partition`: which client would get which images, before anything is trained."""

from pathlib import Path
from typing import Annotated

import typer

from fedssl.cli.arguments import SetOption, SpecArgument
from fedssl.cli.datasets.fetching import ensure
from fedssl.cli.destinations import require_folder, require_place
from fedssl.cli.output import Format, FormatOption, note
from fedssl.cli.specs import read_spec, require_partition


def partition(
    spec: SpecArgument,
    set_: SetOption = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="PNG", help="Draw a picture: a bar per client, coloured by class.", dir_okay=False),
    ] = None,
    shards: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Write each client's images to DIR/CLIENT/images.npz, for the --data of a worker."
        ),
    ] = None,
    output: FormatOption = Format.TABLE,
) -> None:
    """Show how the [partition] of a spec divides the images: how many each client gets, and their classes.

    Example: `fedssl partition examples/demo.toml --out partition.png`

    The number of effective classes is the exponential of the entropy of a client's labels: 1 if the client has one
    class, 10 if it has equally many images of ten classes. The command reads only labels, and trains nothing. With
    --shards it also reads the images; running it again writes the same files.
    """
    read = read_spec(spec, set_)
    config = require_partition(read, spec)
    if out is not None:
        require_place("--out", out)
    if shards is not None:
        require_folder("--shards", shards)
    ensure(config.dataset, note)
    from fedssl.cli.datasets.partition_report import show_partition

    show_partition(read, config, out, shards, output)
