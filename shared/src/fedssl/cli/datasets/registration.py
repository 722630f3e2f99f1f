"""The common part of `fedssl public-dataset add` and `fedssl evaluation-dataset add`."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from fedssl.cli.datasets.fetching import data_folder, ensure
from fedssl.cli.errors import UsageError
from fedssl.cli.output import note
from fedssl.errors import DataError

if TYPE_CHECKING:
    from fedssl.data import ImageData

NameArgument = Annotated[
    str,
    typer.Argument(metavar="NAME", help="The name for runs to use: lower-case letters, digits, dots, hyphens."),
]
SourceArgument = Annotated[
    str, typer.Argument(metavar="SOURCE", help="The images: a folder, an .npz file, or the name of a known data set.")
]
ImageSizeOption = Annotated[
    int | None, typer.Option(min=8, max=512, help="Scale to this height and width.  [default: the images' own size]")
]
ChannelsOption = Annotated[
    int | None,
    typer.Option(min=1, max=3, help="1: grey; 3: RGB.  [default: the images' own channels]", show_default=False),
]
SeedOption = Annotated[int, typer.Option(min=0, help="Seed of the choice of images, if only some are registered.")]

REGISTRATION_HELP = (
    "You can register the same images under the same name again; other images under that name are refused. The images "
    "are first written to a temporary file (in TMPDIR), and only what the coordinator lacks is sent."
)


def check_channels(given: int | None) -> Literal[1, 3] | None:
    """Return the value of `--channels`. Raises UsageError."""
    if given == 2:
        raise UsageError("--channels must be 1 or 3")
    return None if given is None else 1 if given == 1 else 3


def read_split(
    source: str, split: Literal["train", "test"], image_size: int | None, channels: Literal[1, 3] | None
) -> "ImageData":
    """Read one split of the source, after downloading it if possible. Raises DataError."""
    from fedssl.data.dataset_files import load_own
    from fedssl.data.windowing import WindowMissing

    ensure(source, note)
    try:
        return load_own(source, split, data_folder(), image_size=image_size, channels=channels)
    except WindowMissing as error:
        raise DataError(
            f"{source} has images of more than 8 bits per value, and a coordinator keeps images of 8 bits: convert "
            "them first, for example with fedssl.data.window"
        ) from error


@contextmanager
def temporary_file() -> Iterator[Path]:
    """Yield a path for the file to send. It is deleted after the block."""
    with tempfile.TemporaryDirectory(prefix="fedssl-") as folder:
        yield Path(folder) / "images.safetensors"
