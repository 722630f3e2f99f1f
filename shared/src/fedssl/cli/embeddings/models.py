"""The encoder that `--model` names: a folder, a file in it, or a run at the coordinator."""

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedssl.cli.connection.completion import complete_run
from fedssl.cli.connection.connect import connect, find_run
from fedssl.cli.errors import UsageError
from fedssl.cli.progress_bar import progress_bar
from fedssl.run_files import MODEL, SPEC, write_spec

if TYPE_CHECKING:
    from fedssl.embeddings.encoders import Model

ModelOption = Annotated[
    str,
    typer.Option(
        metavar="MODEL",
        help="A folder that `fedssl run pull` or `fedssl simulate` wrote, a model file in it, or a run's id.",
        autocompletion=complete_run,
    ),
]


def read_model(text: str, url: str | None, token_file: Path | None) -> "tuple[Model, str]":
    """Return the encoder, and how to find it again. A run's weights are fetched, and not kept.

    Raises UsageError if there is neither such a path nor such a run.
    """
    from fedssl.embeddings.encoders import load_model

    path = Path(text).expanduser()
    if path.exists():
        return load_model(path), str(path.absolute())
    if set(text.lower().replace("-", "")) - set("0123456789abcdef"):
        raise UsageError(
            f"--model {text}: there is no such folder, and it is not a run's id: give a folder of `fedssl run pull`, "
            "or an id that `fedssl run ls` lists"
        )
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with connect(url, token_file, patience_seconds=30) as client:
            run = client.run(find_run(client, text))
            with progress_bar("fetching", None, 1e6, " MB") as fetched:
                client.download_model(run.id, folder / MODEL, on_bytes=fetched, on_size=lambda size: fetched(0, size))
        write_spec(run.spec, folder / SPEC)
        return load_model(folder), str(run.id)
