"""`fedssl run rounds`, `run metrics` and `run export-metrics`: how rounds ended, and all numbers of a run."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from fedssl.cli.arguments import RunArgument, TokenFileOption, UrlOption
from fedssl.cli.connection.connect import connect, find_run, short
from fedssl.cli.output import Format, FormatOption, duration, show_json, show_list, show_result, show_table
from fedssl.cli.run.metric_files import WRITERS, MetricFormat, numbers_of
from fedssl.protocol.views import AssignmentView

_MAX_MISSING = 4


def list_rounds(
    run: RunArgument,
    *,
    number: Annotated[
        int | None,
        typer.Option("--round", metavar="N", min=1, help="Only the clients of this round, each with its state."),
    ] = None,
    url: UrlOption = None,
    token_file: TokenFileOption = None,
    output: FormatOption = Format.TABLE,
) -> None:
    """List a run's rounds: how each ended, how long it took, and which clients did not deliver an update, and why."""
    with connect(url, token_file) as client:
        run_id = find_run(client, run)
        if number is not None:
            assignments = list(client.assignments(run_id, number))
            if output is Format.JSON:
                show_json(assignments)
            else:
                show_assignments(assignments)
            return
        found = list(client.rounds(run_id))
    rows = []
    for view in found:
        newest = {part.client_id: part for part in view.assignments}
        missing = [f"{name}: {part.reason or part.state}" for name, part in newest.items() if part.state != "accepted"]
        more = f"; and {len(missing) - _MAX_MISSING} more" if len(missing) > _MAX_MISSING else ""
        took = None if view.closed_at is None else duration((view.closed_at - view.opened_at).total_seconds())
        rows.append(
            (view.number, view.verdict or view.state, f"{len(newest) - len(missing)}/{len(newest)}", view.opened_at,
             took, view.reason, "; ".join(missing[:_MAX_MISSING]) + more)
        )  # fmt: skip
    show_list(found, ["#round", "verdict", "#updates", "opened", "#took", "reason", "not accepted"], rows, output)


def show_assignments(assignments: Sequence[AssignmentView]) -> None:
    """Print a table with a line per assignment of a round."""
    rows = [
        (part.client_id, part.attempt, part.state, part.num_examples, part.leased_at, part.closed_at, part.cause,
         part.reason)
        for part in assignments
    ]  # fmt: skip
    show_table(["client", "#attempt", "state", "#images", "leased", "closed", "cause", "reason"], rows)


def list_metrics(
    run: RunArgument,
    *,
    name: Annotated[
        str | None, typer.Option(metavar="NAME", help="Only the numbers with this name, for example `loss`.")
    ] = None,
    url: UrlOption = None,
    token_file: TokenFileOption = None,
    output: FormatOption = Format.TABLE,
) -> None:
    """List a run's numbers: those of each client, and those of the whole round, whose client is `-`."""
    with connect(url, token_file) as client:
        found = list(client.metrics(find_run(client, run), name))
    rows = [(view.round_number, view.client_id, view.name, view.value) for view in found]
    show_list(found, ["#round", "client", "name", "#value"], rows, output)


def export_metrics(
    run: RunArgument,
    *,
    to: Annotated[MetricFormat, typer.Option(help="The format.")],
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="PATH",
            help="The file, TensorBoard's folder or MLflow's experiment.  [default: named after the run]",
        ),
    ] = None,
    url: UrlOption = None,
    token_file: TokenFileOption = None,
    output: FormatOption = Format.TABLE,
) -> None:
    """Export all numbers of a run and of its evaluations, for other programs.

    \b
    csv, json    a file
    tensorboard  an event file in a folder, for `tensorboard --logdir`;
                 needs pip install tensorboard
    mlflow       a run in an experiment of the server MLFLOW_TRACKING_URI;
                 needs pip install mlflow
    """
    with connect(url, token_file, patience_seconds=30) as client:
        view = client.run(find_run(client, run))
        numbers = numbers_of(client, view)
    name = f"run-{short(view.id)}"
    path = out or Path(
        f"{name}.{to}" if to in ("csv", "json") else "fedssl" if to == "mlflow" else f"tensorboard/{name}"
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    WRITERS[to](view, numbers, path)
    document = {"run": str(view.id), "to": to, "out": str(path), "num_numbers": len(numbers)}
    show_result(document, f"{len(numbers):,} numbers are in {path}", output)
