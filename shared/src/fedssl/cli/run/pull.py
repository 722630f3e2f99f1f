"""`fedssl run pull`: the weights of a run and what describes them, as files."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal
from uuid import UUID

import typer

from fedssl.cli.arguments import RunArgument, TokenFileOption, UrlOption
from fedssl.cli.connection.connect import connect, find_run, short
from fedssl.cli.output import Format, FormatOption, show_json, show_pairs
from fedssl.cli.progress_bar import progress_bar
from fedssl.cli.run import model_card, model_files

if TYPE_CHECKING:
    from fedssl.client import Client


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
    with connect(url, token_file, patience_seconds=30) as client:
        view = client.run(find_run(client, run))
        folder = out or Path(f"run-{short(view.id)}")
        model = folder / (model_files.INITIAL if initial else model_files.MODEL)
        digest = _fetch(client, view.id, model, "initial" if initial else "latest")
        while not initial and view.model != digest:  # a round has closed since: the card must describe these weights
            view = client.run(view.id)
            if view.model != digest:
                digest = _fetch(client, view.id, model, "latest")
        files = {"model": str(model), "spec": str(folder / model_files.SPEC)}
        model_files.write_spec(view.spec, folder / model_files.SPEC)
        if not initial:
            model_files.export_encoder(model, folder / model_files.ENCODER)
            files["encoder"] = str(folder / model_files.ENCODER)
            files |= model_card.write_card(client, view, digest, folder / model_files.ENCODER, folder)
    if output is Format.JSON:
        show_json({"run": str(view.id), "rounds_closed": view.rounds_closed, "sha256": digest, "files": files})
        return
    show_pairs({**files, "sha256": digest, "rounds": f"{view.rounds_closed} of {view.num_rounds}"})


def _fetch(client: "Client", run_id: UUID, model: Path, which: Literal["latest", "initial"]) -> str:
    with progress_bar("fetching", None, 1e6, " MB") as fetched:
        return client.download_model(run_id, model, which, on_bytes=fetched, on_size=lambda size: fetched(0, size))
