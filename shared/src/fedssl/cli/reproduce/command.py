"""`fedssl reproduce`: the papers' tables, rerun in full or scaled down, with published next to measured numbers."""

import re
from pathlib import Path
from typing import Annotated

import typer

from fedssl.cli.arguments import DataFolderOption, DeviceOption, JobsOption, SetOption, ThreadsOption, read_seeds
from fedssl.cli.errors import UsageError
from fedssl.cli.output import Format, FormatOption

FOLDER = Path("reproductions")
_UNITS = {"": 1, "s": 1, "m": 60, "h": 3600}


def reproduce(
    what: Annotated[
        str | None,
        typer.Argument(
            metavar="TABLE[:ROW][@COLUMN]",
            help="What to run: `fedx-1:SimCLR+FedX@cifar10`. Without a row or column: all of them.",
        ),
    ] = None,
    budget: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="Scale all cells down alike to fit into this time: 90s, 5m or 2h."),
    ] = None,
    seeds: Annotated[str, typer.Option(metavar="S,...", help="Seeds of the runs and of their partitions.")] = "0",
    set_: SetOption = None,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder for runs and results.")] = FOLDER,
    device: DeviceOption = "cpu",
    jobs: JobsOption = "1",
    threads: ThreadsOption = 1,
    data_folder: DataFolderOption = None,
    *,
    list_: Annotated[
        bool, typer.Option("--list", help="Show the tables and rows, with the cost of each run, and run nothing.")
    ] = False,
    spec: Annotated[bool, typer.Option("--spec", help="Show the specs, and run nothing.")] = False,
    report: Annotated[
        bool, typer.Option("--report", help="Show the results so far as Markdown, and run nothing.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Start even if it will take more than an hour.")] = False,
    restart: Annotated[bool, typer.Option("--restart", help="Run again what has been run already.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Measure and choose the scale, show what would be run, and run nothing.")
    ] = False,
    output: FormatOption = Format.TABLE,
) -> None:
    """Run cells of the five papers' tables, and show published next to measured numbers and every differing setting.

    Example: `fedssl reproduce fedx-1:SimCLR+FedX@cifar10 --budget 5m`. Without arguments it lists the tables.

    Without --budget it uses the paper's own settings: model, images, rounds, epochs and evaluation. With --budget it
    reduces the rounds to 20, then the images, the encoder's width, the epochs and finally the seeds, until everything
    fits. It measures first: this machine's speed, and then the first rounds of the real runs; the results record both.
    The clients, their sampling and the concentration of the partition stay. If the command is interrupted, run
    it again to continue.
    """
    from fedssl.cli.reproduce import steps, tables

    if what is None and budget is not None:
        raise UsageError("--budget is for runs: give a table, for example `fedssl reproduce fedx-1 --budget 5m`")
    if report:
        tables.show_report(out, output)
    elif list_ or (what is None and not spec):
        tables.show_list(steps.select_cells(what), output, every_column=what is not None)
    elif spec:
        tables.show_specs(steps.read_tasks(what, set_ or []), output)
    else:
        request = steps.Request(
            what=what,
            budget_seconds=None if budget is None else seconds_of(budget),
            seeds=read_seeds(seeds),
            changes=set_ or [],
            out=out,
            device=device,
            jobs=jobs,
            threads=threads,
            data_folder=data_folder,
            allow_long=yes,
            restart=restart,
            dry_run=dry_run,
        )
        outcome = steps.run(request)
        if dry_run:
            tables.show_plan(outcome, output)
            return
        tables.show_results(outcome.results, output)
        if outcome.failures:
            raise typer.Exit(1)


def seconds_of(text: str) -> float:
    """Return a duration such as 90s, 5m or 1.5h in seconds. Raises UsageError.

    >>> seconds_of("5m")
    300.0
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smh]?)", text.strip())
    if found is None or float(found[1]) <= 0:
        raise UsageError(f"--budget {text}: give a duration such as 90s, 5m or 2h")
    return float(found[1]) * _UNITS[found[2]]
