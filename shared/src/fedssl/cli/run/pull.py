"""`fedssl run pull`: the weights of a run and what describes them, as files."""

from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedssl.cli.arguments import RunArgument, TokenFileOption, UrlOption
from fedssl.cli.connection.connect import connect, find_run
from fedssl.cli.output import Format, FormatOption, show_json, show_pairs
from fedssl.cli.progress_bar import progress_bar

if TYPE_CHECKING:
    from fedssl.client.downloads import OnBytes, OnSize


def pull(
    run: RunArgument,
    *,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Folder for the files.  [default: ./run-ID]")] = None,
    initial: Annotated[bool, typer.Option("--initial", help="Fetch only the weights before training.")] = False,
    url: UrlOption = None,
    token_file: TokenFileOption = None,
    output: FormatOption = Format.TABLE,
) -> None:
    """Fetch a run's weights, the encoder on its own, the spec, and a model card.

    Example: `fedssl run pull 1a2b3c4d --out results`

    The files are model.safetensors, encoder.safetensors, spec.yaml, model-card.md and lineage.json; with --initial only
    initial.safetensors and spec.yaml. In Python, `fedssl.models.load_encoder(DIR)` loads the encoder. `fedssl export`
    and `fedssl evaluate` read the model from the folder. If a download is interrupted, the same command in the same
    folder continues it, unless a new round has closed.
    """
    with connect(url, token_file, patience_seconds=30) as client, ExitStack() as bars:

        def on_fetch() -> tuple["OnBytes", "OnSize"]:
            fetched = bars.enter_context(progress_bar("fetching", None, 1e6, " MB"))
            return fetched, lambda size: fetched(0, size)

        pulled = client.pull(find_run(client, run), out, initial=initial, on_fetch=on_fetch)
    view, files = pulled.run, {what: str(path) for what, path in pulled.files.items()}
    if output is Format.JSON:
        show_json({"run": str(view.id), "rounds_closed": view.rounds_closed, "sha256": pulled.digest, "files": files})
        return
    show_pairs({**files, "sha256": pulled.digest, "rounds": f"{view.rounds_closed} of {view.num_rounds}"})
