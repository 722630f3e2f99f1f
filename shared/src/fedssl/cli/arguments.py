"""Arguments and options that several commands share, and how their values are read."""

from pathlib import Path
from typing import Annotated, Literal

import typer
from pydantic import TypeAdapter, ValidationError

from fedssl.cli.connection.completion import complete_client, complete_run
from fedssl.cli.errors import UsageError
from fedssl.protocol.base import RegisteredName
from fedssl.protocol.tokens import lifetime

UrlOption = Annotated[
    str | None,
    typer.Option("--url", metavar="URL", help="Address of the coordinator.  [env var: FEDSSL_URL; else ./.fedssl]"),
]
ProjectOption = Annotated[
    str | None,
    typer.Option("--project", metavar="NAME", help="The project.  [default: that of your token, or `default`]"),
]
TokenFileOption = Annotated[
    Path | None,
    typer.Option(
        "--token-file",
        metavar="FILE",
        help="File with your token.  [env var: FEDSSL_TOKEN, FEDSSL_TOKEN_FILE; else ./.fedssl]",
    ),
]
RunArgument = Annotated[
    str,
    typer.Argument(
        metavar="RUN",
        help="A run's id, or its first 4 or more characters if no other run's id begins with them.",
        autocompletion=complete_run,
    ),
]
ClientArgument = Annotated[
    str, typer.Argument(metavar="CLIENT", help="A data owner's name.", autocompletion=complete_client)
]
SpecArgument = Annotated[
    str, typer.Argument(metavar="SPEC", help="A run spec: a .toml, .yaml or .json file, or - for standard input.")
]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Change one key of the spec: `--set training.batch_size=64`. The value is read as TOML if it is valid "
        "TOML, and as text otherwise; `null` clears the key. Repeat the option to change several keys.",
    ),
]
DeviceOption = Annotated[str, typer.Option(help="Device to compute on: cpu, cuda or cuda:N.")]
EncoderThreadsOption = Annotated[
    int, typer.Option("--threads", min=1, help="CPU threads. 1 gives the same numbers every time.")
]
ImagesArgument = Annotated[
    str,
    typer.Argument(
        metavar="IMAGES",
        help="A folder with images at any depth, an .npz file, or a known data set (`fedssl data ls`).",
    ),
]
SplitOption = Annotated[
    Literal["train", "test"] | None,
    typer.Option(help="The split of an .npz file or a known data set.  [default: train]"),
]
ThreadsOption = Annotated[int, typer.Option(min=1, help="CPU threads. 1 gives the same bits as a deployed federation.")]
JobsOption = Annotated[
    str,
    typer.Option(
        metavar="N",
        help="Processes that train clients at the same time, each with --threads CPU threads. On a CPU, any number "
        "gives the same bits; on a GPU, only with `training.deterministic`. With `--device cuda` they use all GPUs. "
        "`auto`: one per GPU, or per --threads CPU cores.",
    ),
]
DataFolderOption = Annotated[
    Path | None,
    typer.Option(metavar="DIR", help="Folder of data sets, searched before FEDSSL_DATA and the user's cache."),
]


def seconds_of(option: str, text: str) -> int:
    """Return a duration such as 30m or 12h in seconds. Raises UsageError, which names the option.

    >>> seconds_of("--timeout", "30m")
    1800
    """
    try:
        return lifetime(text)
    except ValueError as error:
        raise UsageError(f"{option}: {error}") from None


def read_seeds(text: str) -> list[int]:
    """Return the whole numbers of `--seeds`. Raises UsageError.

    >>> read_seeds("0,1")
    [0, 1]
    """
    try:
        found = [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        found = []
    if not found:
        raise UsageError(f"--seeds {text}: give whole numbers separated by commas, for example 0,1,2")
    if twice := [seed for seed in found if found.count(seed) > 1]:
        raise UsageError(f"--seeds {text}: the seed {twice[0]} is listed twice: list it once")
    return found


def check_name(name: str) -> None:
    """Raise UsageError if nothing can be registered under the name."""
    try:
        TypeAdapter(RegisteredName).validate_python(name)
    except ValidationError:
        raise UsageError(
            f"{name!r} cannot be a name: use at most 63 lower-case letters and digits, with single dots, hyphens or "
            "underscores between them"
        ) from None
