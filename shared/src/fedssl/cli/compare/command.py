"""`fedssl compare`: several methods on the same clients and budgets, over several seeds."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedssl.cli.compare.arguments import read_contestants
from fedssl.cli.errors import UsageError
from fedssl.cli.output import console, duration, note, show_json, show_pairs, show_table
from fedssl.cli.simulate import DataFolderOption, DeviceOption, datasets_of, measured, prepare
from fedssl.cli.specs import SpecArgument

if TYPE_CHECKING:
    from fedssl.experiments.comparison import Entry, Outcome, Watcher
    from fedssl.experiments.summary import Line, Spread

DOCUMENT, TABLE, PICTURE = "comparison.json", "comparison.csv", "comparison.png"


class ResultFormat(StrEnum):
    """How results are written."""

    TABLE = "table"
    JSON = "json"
    CSV = "csv"


def compare(
    spec: SpecArgument,
    methods: Annotated[
        str | None,
        typer.Option(
            metavar="A,B,...",
            help="Methods by name; `fedmoco+fedx` is a method with an add-on.  [default: the spec's own]",
        ),
    ] = None,
    variant: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=METHOD[:KEY=VALUE,...]",
            help="A method with other parameters, under a name of its own: `soft=ssd:dsr.alpha=5`. May be repeated.",
        ),
    ] = None,
    seeds: Annotated[str, typer.Option(metavar="S,...", help="Seeds, of the run and its partition.")] = "0",
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="[METHOD:]KEY=VALUE",
            help="Change a key of the spec, for all or for one method or variant: `--set fedx:training.batch_size=64`.",
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder for the results.  [default: ./compared-NAME]")
    ] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Runs at the same time, each a process with one CPU thread.")] = 1,
    device: DeviceOption = "cpu",
    threads: Annotated[int, typer.Option(min=1, help="CPU threads of a run, where --jobs is 1.")] = 1,
    data_folder: DataFolderOption = None,
    *,
    restart: Annotated[bool, typer.Option("--restart", help="Begin anew, whatever the folder holds.")] = False,
    output: Annotated[
        ResultFormat, typer.Option("--format", help="`json` or `csv`: on standard output, and nothing else there.")
    ] = ResultFormat.TABLE,
) -> None:
    """Train several methods on the same clients with the same budget, over several seeds, and compare them.

    Every method gets the spec's rounds, epochs, batches, model and images; at each seed all get the same partition. In
    a key, an add-on's name leads to its parameters (`dsr.alpha`), a section of the spec to its keys
    (`training.batch_size`), and anything else is a parameter of the method (`temperature`).

    Interrupted, the same command goes on where it was: finished runs are kept, an unfinished one resumes after its last
    round. More methods or seeds may be added later. A run that fails is shown with its reason and ends no other.

    Writes a folder for each run, comparison.json, comparison.csv and comparison.png.
    """
    base, contestants = read_contestants(spec, methods, variant or [], set_ or [])
    folder = out or Path(f"compared-{str(base.get('name', 'unnamed')).replace(' ', '-')}")
    from fedssl.experiments.comparison import plan

    entries = plan(base, contestants, _numbers(seeds), folder)
    datasets = {name for entry in entries if entry.spec is not None for name in datasets_of(entry.spec)}
    machine = prepare(device, threads, data_folder, datasets)
    from fedssl.experiments import comparison, runs, summary

    if restart:
        for entry in entries:
            runs.clear(entry.folder)
    comparison.require_own(entries)
    try:
        with _display(entries) as watcher:
            outcomes = comparison.run_all(entries, machine=machine, jobs=jobs, watcher=watcher)
    except KeyboardInterrupt:
        note("interrupted: the same command keeps what is finished and goes on with the rest")
        raise
    lines = summary.summarise(entries, outcomes)
    apart = comparison.settings_apart(entries)
    _write(folder, lines, entries, outcomes, apart)
    _show(folder, lines, entries, apart, output)
    if not any(line.seeds for line in lines):
        raise typer.Exit(1)


def _numbers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        raise UsageError(f"--seeds {text}: write whole numbers with commas between them, such as 0,1,2") from None


@contextmanager
def _display(entries: "Sequence[Entry]") -> "Iterator[Watcher]":
    """A bar over all rounds of all runs on a terminal, a line for each finished run where output is piped."""
    from fedssl.experiments.comparison import Failure, Watcher

    def end(entry: "Entry", outcome: "Outcome") -> None:
        if isinstance(outcome, Failure):
            note(f"{entry.variant}, seed {entry.seed}: failed: {outcome.reason}")
        else:
            note(f"{entry.variant}, seed {entry.seed}: {_accuracy(outcome.last)}, {duration(outcome.seconds)}")

    screen = console(stderr=True)
    if not screen.is_terminal:
        yield Watcher(on_end=end)
        return
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    rounds = {(entry.variant, entry.seed): entry.spec.num_rounds for entry in entries if entry.spec is not None}
    done = dict.fromkeys(rounds, 0)
    with Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TimeRemainingColumn(),
        console=screen,
        transient=True,
    ) as progress:
        task = progress.add_task("starting", total=sum(rounds.values()))

        def advance(entry: "Entry", rounds_done: int) -> None:
            done[entry.variant, entry.seed] = rounds_done
            text = f"{entry.variant}, seed {entry.seed}: round {rounds_done} of {rounds[entry.variant, entry.seed]}"
            progress.update(task, completed=sum(done.values()), description=text)

        def finish(entry: "Entry", outcome: "Outcome") -> None:
            if entry.spec is not None:
                done[entry.variant, entry.seed] = entry.spec.num_rounds
                progress.update(task, completed=sum(done.values()))
            end(entry, outcome)

        yield Watcher(on_round=advance, on_end=finish)


def _accuracy(values: Mapping[str, float]) -> str:
    return measured(dict(values)) or "not judged"


def _write(
    folder: Path,
    lines: "Sequence[Line]",
    entries: "Sequence[Entry]",
    outcomes: "Mapping[tuple[str, int], Outcome]",
    apart: Mapping[str, Mapping[str, Any]],
) -> None:
    from fedssl.experiments.comparison import Failure
    from fedssl.experiments.files import write_json, write_text
    from fedssl.experiments.plots import plot_comparison
    from fedssl.experiments.summary import to_csv, to_document

    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / DOCUMENT, to_document(lines, entries, apart))
    write_text(folder / TABLE, to_csv(lines))
    kept = {key: outcome for key, outcome in outcomes.items() if not isinstance(outcome, Failure)}
    finished = {line.variant: [kept[line.variant, seed] for seed in line.seeds] for line in lines}
    judged = [run for runs in finished.values() for run in runs if run.evaluations]
    if judged:
        plot_comparison(folder / PICTURE, finished, "probe" if "probe" in judged[0].last else "knn")


def _show(
    folder: Path,
    lines: "Sequence[Line]",
    entries: "Sequence[Entry]",
    apart: Mapping[str, Mapping[str, Any]],
    output: ResultFormat,
) -> None:
    from fedssl.experiments.files import finite
    from fedssl.experiments.summary import to_csv, to_document

    if output is ResultFormat.JSON:
        show_json(finite(to_document(lines, entries, apart)))
        return
    if output is ResultFormat.CSV:
        typer.echo(to_csv(lines), nl=False)
        return
    _show_tables(lines)
    for line in lines:
        for reason in dict.fromkeys(line.failures.values()):
            failed = [str(seed) for seed, why in line.failures.items() if why == reason]
            typer.echo(f"{line.variant} failed (seed {', '.join(failed)}): {reason}")
    for variant, changed in apart.items():
        typer.echo(f"{variant} has settings of its own: {', '.join(f'{k}={v}' for k, v in changed.items())}")
    show_pairs({"results": str(folder / DOCUMENT), "table": str(folder / TABLE), "picture": str(folder / PICTURE)})


def _show_tables(lines: "Sequence[Line]") -> None:
    def percent(value: float) -> str:
        return f"{100 * value:.2f}"

    def row(line: "Line", shown: Mapping[str, Callable[[float], str]]) -> list[str]:
        return [line.variant, *(_spread(line.spread(column), how) for column, how in shown.items())]

    quality: dict[str, Callable[[float], str]] = {
        **dict.fromkeys(("probe_last", "probe_best", "knn_last", "knn_best"), percent),
        "uniformity": lambda value: f"{value:.3f}",
        "effective_rank": lambda value: f"{value:.1f}",
    }
    typer.echo(
        "Quality: mean ± standard deviation over seeds, accuracies in %; best rounds are chosen on the test set."
    )
    show_table(
        ["method", "#probe, last", "#best", "#kNN, last", "#best", "#uniformity", "#effective rank", "#seeds"],
        [[*row(line, quality), f"{len(line.seeds)} of {len(line.seeds) + len(line.failures)}"] for line in lines],
    )
    cost: dict[str, Callable[[float], str]] = {
        **dict.fromkeys(("megabytes_up", "megabytes_down"), lambda value: f"{value:,.1f}"),
        "num_images": lambda value: f"{value:,.0f}",
        "seconds": duration,
        "points_per_gigabyte": lambda value: f"{value:,.1f}",
    }
    typer.echo("Cost: mean over seeds, of all clients and rounds together.")
    show_table(
        ["method", "#MB up", "#MB down", "#images", "#time", "#probe % per GB"],
        [
            [
                line.variant,
                *("-" if not (found := line.spread(column)) else how(found.mean) for column, how in cost.items()),
            ]
            for line in lines
        ],
    )


def _spread(found: "Spread | None", how: "Callable[[float], str]") -> str:
    if found is None:
        return "-"
    return how(found.mean) if found.deviation is None else f"{how(found.mean)} ± {how(found.deviation)}"
