"""`fedssl weights`: weights that runs may start from, registered with the coordinator."""

from pathlib import Path
from typing import Annotated

import typer

from fedssl.cli.arguments import ProjectOption, SetOption, SpecArgument, TokenFileOption, UrlOption, check_name
from fedssl.cli.connection.choice import CONNECTION_HINT
from fedssl.cli.connection.connect import connect
from fedssl.cli.errors import UsageError
from fedssl.cli.output import Format, FormatOption, note, show_json, show_list, show_registered, show_result, show_table
from fedssl.cli.progress_bar import progress_bar
from fedssl.cli.specs import read_spec

app = typer.Typer(
    help="Register weights, so that runs can start from them instead of random ones.\n\n"
    "Example: `fedssl weights add resnet50.safetensors --as imagenet-r50`",
    epilog=CONNECTION_HINT,
    no_args_is_help=True,
)

NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="The name of registered weights.")]
FileArgument = Annotated[
    Path,
    typer.Argument(
        metavar="FILE",
        help="A safetensors file with names of fedssl, torchvision, timm or Hugging Face's ResNets.",
    ),
]


@app.command(epilog='A run starts from the weights if its spec has `weights = "NAME"` under [model.initial].')
def add(
    file: FileArgument,
    *,
    name: Annotated[
        str, typer.Option("--as", metavar="NAME", help="Their name: lower-case letters, digits, dots, hyphens.")
    ],
    project: ProjectOption = None,
    url: UrlOption = None,
    token_file: TokenFileOption = None,
    output: FormatOption = Format.TABLE,
) -> None:
    """Register the weights in a file.

    The tensors are sent under the names of fedssl, whatever library they came from, so that the same weights always
    have the same digest. The weights of a name never change: registering the same again succeeds.
    """
    check_name(name)
    from fedssl.artifacts.weight_files import read_weights

    weights = read_weights(_existing(file))
    num_bytes = sum(array.nbytes for array in weights.arrays.values())
    with (
        connect(url, token_file, patience_seconds=30) as client,
        progress_bar("sending", num_bytes, 1e6, " MB") as sent,
    ):
        view = client.add_weights(name, weights, project=project, on_bytes=sent)
    if output is Format.JSON:
        show_json(view)
        return
    note(f"{view.name} is registered: {view.num_tensors} tensors of {view.family}, digest {view.digest}")
    if weights.left_out:
        note(f"left out, because they belong to no encoder: {', '.join(weights.left_out)}")


@app.command()
def check(file: FileArgument, spec: SpecArgument, set_: SetOption = None, output: FormatOption = Format.TABLE) -> None:
    """Show what would become of each tensor if a run of the spec started from the weights in a file.

    Needs no coordinator. The exit code is 1 if the weights do not fit the spec's [model.encoder].
    """
    wanted = read_spec(spec, set_)
    from fedssl.artifacts.weight_files import read_weights
    from fedssl.models.initial import table_for

    weights = read_weights(_existing(file))
    adapt = () if wanted.model.initial is None else wanted.model.initial.adapt
    shapes = {name: array.shape for name, array in weights.arrays.items()}
    table = table_for(wanted.model.encoder, wanted.data, shapes, adapt)
    if output is Format.JSON:
        rows = [{"name": r.name, "fate": r.fate, "given": r.given, "wanted": r.wanted} for r in table.rows]
        show_json({"fits": table.fits, "tensors": rows})
    else:
        shown = [(row.name, row.fate, _shape(row.given), _shape(row.wanted)) for row in table.rows]
        show_table(["tensor", "fate", "in the file", "in the network"], shown)
        note(f"{'these weights fit' if table.fits else 'these weights do not fit'}: {table}")
    if not table.fits:
        raise typer.Exit(1)


@app.command("ls")
def list_weights(
    url: UrlOption = None, token_file: TokenFileOption = None, output: FormatOption = Format.TABLE
) -> None:
    """List the registered weights."""
    with connect(url, token_file) as client:
        found = list(client.weights())
    rows = [
        (view.name, view.family, view.num_tensors, view.num_parameters, view.digest[:12], view.created_at)
        for view in found
    ]
    columns = ["name", "names of", "#tensors", "#parameters", "digest", "registered"]
    show_list(found, columns, rows, output, projects=[view.project for view in found])


@app.command()
def show(
    name: NameArgument, url: UrlOption = None, token_file: TokenFileOption = None, output: FormatOption = Format.TABLE
) -> None:
    """Show registered weights. `source digest` is the sha256 of the file that they were read from."""
    with connect(url, token_file) as client:
        show_registered(client.weights_named(name), output)


@app.command()
def remove(
    name: NameArgument, url: UrlOption = None, token_file: TokenFileOption = None, output: FormatOption = Format.TABLE
) -> None:
    """Remove registered weights, so that no new run can start from them. Runs that exist keep theirs."""
    with connect(url, token_file) as client:
        client.remove_weights(name)
    show_result({"removed": name}, f"{name} is removed: no new run can start from it", output)


def _existing(file: Path) -> Path:
    if not file.is_file():
        raise UsageError(f"there is no file {file}")
    return file


def _shape(shape: tuple[int, ...] | None) -> str | None:
    return None if shape is None else " x ".join(map(str, shape)) or "1"
