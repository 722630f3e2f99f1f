"""What `fedssl public-dataset add` and `fedssl evaluation-dataset add` have in common."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from fedssl.cli.errors import UsageError
from fedssl.cli.output import note

if TYPE_CHECKING:
    from fedssl.data import ImageData

NameArgument = Annotated[
    str,
    typer.Argument(metavar="NAME", help="What runs will call it: lower-case letters, digits, dots, hyphens."),
]
SourceArgument = Annotated[
    str, typer.Argument(metavar="SOURCE", help="The images: a folder, an .npz file, or a known data set's name.")
]
ImageSizeOption = Annotated[
    int | None, typer.Option(min=8, max=512, help="Scale to this height and width.  [default: the images' own]")
]
ChannelsOption = Annotated[
    int | None, typer.Option(min=1, max=3, help="1: grey; 3: RGB.  [default: the images' own]", show_default=False)
]
SeedOption = Annotated[int, typer.Option(min=0, help="Decides which images are drawn where there are more.")]


def check_name(name: str) -> None:
    """Raise UsageError where no data set can be registered under the name."""
    from pydantic import TypeAdapter, ValidationError

    from fedssl.protocol.base import RegisteredName

    try:
        TypeAdapter(RegisteredName).validate_python(name)
    except ValidationError:
        raise UsageError(
            f"{name!r} cannot be a name: take at most 63 lower-case letters and digits, with single dots, hyphens or "
            "underscores between them"
        ) from None


def channels_of(given: int | None) -> Literal[1, 3] | None:
    """The option's value. Raises UsageError."""
    if given == 2:
        raise UsageError("--channels is 1 or 3")
    return None if given is None else 1 if given == 1 else 3


def read_split(
    source: str, split: Literal["train", "test"], image_size: int | None, channels: Literal[1, 3] | None
) -> "ImageData":
    """One split of the source, fetched where that is possible. Raises DataError."""
    from fedssl.cli.datasets.commands import data_folder, ensure
    from fedssl.image_files import load_own

    ensure(source, note)
    return load_own(source, split, data_folder(), image_size=image_size, channels=channels)


@contextmanager
def temporary_file() -> Iterator[Path]:
    """A place for the file, for as long as they are sent."""
    with tempfile.TemporaryDirectory(prefix="fedssl-") as folder:
        yield Path(folder) / "images.safetensors"
