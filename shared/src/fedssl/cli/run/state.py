"""`fedssl run state`: the state of a run's method on the coordinator."""

import math

import typer

from fedssl.artifacts.header import TensorEntry
from fedssl.cli.arguments import RunArgument, TokenFileOption, UrlOption
from fedssl.cli.connection.connect import connect, find_run
from fedssl.cli.output import Format, FormatOption, note, show_json, show_table
from fedssl.wording import plural


def show_state(
    run: RunArgument, url: UrlOption = None, token_file: TokenFileOption = None, output: FormatOption = Format.TABLE
) -> None:
    """Show the state of a run's method on the coordinator: global weights, and for example centers or control variates.

    The table has a line per part; `--format json` lists each tensor. `fedssl run pull` fetches the weights.
    """
    with connect(url, token_file) as client:
        view = client.run(find_run(client, run))
        digest = view.server_state
        entries = [] if digest is None else list(client.artifact_header(digest).entries)
    if output is Format.JSON:
        tensors = [{"name": entry.name, "dtype": entry.dtype, "shape": entry.shape} for entry in entries]
        show_json({"run": str(view.id), "rounds_closed": view.rounds_closed, "artifact": digest, "tensors": tensors})
        return
    if digest is None:
        note("the run has no state yet: start it, and wait for its first round to open")
        return
    parts: dict[str, list[TensorEntry]] = {}
    for entry in sorted(entries, key=lambda entry: entry.name):
        parts.setdefault(entry.name.partition(".")[0], []).append(entry)
    show_table(["part", "#tensors", "#numbers", "#bytes", "shape"], [_row(name, parts[name]) for name in parts])
    typer.echo(f"after {view.rounds_closed} of {plural(view.num_rounds, 'round')}, artifact {digest}")


def _row(name: str, entries: list[TensorEntry]) -> tuple[object, ...]:
    numbers = sum(math.prod(entry.shape) for entry in entries)
    size = sum(entry.stop - entry.start for entry in entries)
    shape = " x ".join(map(str, entries[0].shape)) if len(entries) == 1 else None
    return name, len(entries), numbers, size, shape
