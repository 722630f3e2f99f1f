"""`fedssl reproduce`: the papers' tables, run again in full or scaled down, published against measured."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedssl.cli.errors import UsageError
from fedssl.cli.output import Format, FormatOption, duration, note
from fedssl.cli.reproduce.tables import show_list, show_report, show_results, show_specs
from fedssl.cli.simulate import DataFolderOption, DeviceOption, ThreadsOption, display, prepare
from fedssl.cli.specs import SetOption, apply_change, explain

if TYPE_CHECKING:
    from fedssl.experiments.budget import Speeds
    from fedssl.experiments.papers import Cell
    from fedssl.experiments.reproduction import CellResult, Task
    from fedssl.protocol.runs import RunSpec

FOLDER = Path("reproductions")
LONG_SECONDS = 3600
_UNITS = {"": 1, "s": 1, "m": 60, "h": 3600}


def reproduce(
    what: Annotated[
        str | None,
        typer.Argument(
            metavar="[TABLE[:ROW][@COLUMN]]",
            help="What to run: `fedx-1:SimCLR+FedX@cifar10`; without a row or column all of them.",
        ),
    ] = None,
    budget: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="Scale everything down to fit into 90s, 5m or 2h, all cells alike."),
    ] = None,
    seeds: Annotated[str, typer.Option(metavar="S,...", help="Seeds, of the run and its partition.")] = "0",
    set_: SetOption = None,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder for runs and results.")] = FOLDER,
    device: DeviceOption = "cpu",
    threads: ThreadsOption = 1,
    data_folder: DataFolderOption = None,
    *,
    list_: Annotated[
        bool, typer.Option("--list", help="Show tables and rows, with what each run would cost, and run nothing.")
    ] = False,
    spec: Annotated[bool, typer.Option("--spec", help="Show the specs, and run nothing.")] = False,
    report: Annotated[
        bool, typer.Option("--report", help="Show what has been run so far as Markdown, and run nothing.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Start even what will take more than an hour.")] = False,
    restart: Annotated[bool, typer.Option("--restart", help="Run again what has been run.")] = False,
    output: FormatOption = Format.TABLE,
) -> None:
    """Run cells of the five papers' tables, and show published against measured with every setting that differs.

    Without --budget the paper's own settings run: its model, images, rounds and epochs, judged as it judges. With one,
    rounds shrink to 20, then images, the encoder's width, epochs and at last seeds, until it fits; clients, their
    sampling and the partition's concentration stay. Interrupted, the same command goes on where it was.
    """
    if report:
        show_report(out, output)
        return
    if list_ or (what is None and not spec):
        show_list(what, output)
        return
    from fedssl.experiments import papers

    cells = [one for name in ([what] if what else papers.tables()) for one in papers.select(name)]
    if spec:
        show_specs([_changed(task, set_ or []) for task in _literal(cells)], output)
        return
    results = _run(
        cells, budget, _numbers(seeds), set_ or [], out, (device, threads, data_folder), yes=yes, restart=restart
    )
    show_results(results, output)


def seconds_of(text: str) -> float:
    """A time such as 90s, 5m or 1.5h.

    >>> seconds_of("5m")
    300.0
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smh]?)", text.strip())
    if found is None or float(found[1]) <= 0:
        raise UsageError(f"--budget {text}: write a time such as 90s, 5m or 2h")
    return float(found[1]) * _UNITS[found[2]]


def _run(
    cells: "Sequence[Cell]",
    budget: str | None,
    seeds: list[int],
    changes: Sequence[str],
    out: Path,
    machine_options: tuple[str, int, Path | None],
    *,
    yes: bool,
    restart: bool,
) -> "list[CellResult]":
    device, threads, data_folder = machine_options
    seconds = None if budget is None else seconds_of(budget)
    datasets = {part.dataset for each in cells for part in (each.spec.partition, each.spec.evaluation) if part}
    machine = prepare(device, threads, data_folder, datasets)
    from fedssl.experiments.budget import Speeds
    from fedssl.experiments.reproduction import place_datasets, run_task

    speeds = Speeds(device, on_measuring=lambda text: note(f"measuring {text}"))
    tasks = [_changed(task, changes) for task in _literal(cells)]
    place_datasets(tasks, machine.data_root)  # what is missing is said before anything is measured
    if seconds is None:
        _require_time(tasks, len(seeds), speeds, yes=yes)
    else:
        smaller, seeds = _scaled(cells, seconds, seeds, speeds, out, restart=restart)
        tasks = [_changed(task, changes) for task in smaller]
    tasks = place_datasets(tasks, machine.data_root)
    results = []
    for task in tasks:
        note(f"{task.cell.name}: {_size(task.spec)}")
        results.append(
            run_task(
                task,
                seeds,
                out,
                machine=machine,
                device_name=_device_name(device, threads),
                display=display,
                on_measuring=lambda name: note(f"measuring {name}"),
                restart=restart,
            )
        )
    return results


def _literal(cells: "Sequence[Cell]") -> "list[Task]":
    from fedssl.experiments.reproduction import Task

    return [Task(each, each.spec) for each in cells]


def _scaled(
    cells: "Sequence[Cell]", seconds: float, seeds: list[int], speeds: "Speeds", out: Path, *, restart: bool
) -> "tuple[list[Task], list[int]]":
    """The cells at the largest scale that fits, which is kept for when the command is given again."""
    import hashlib

    from fedssl.experiments.budget import fit, kept_fit
    from fedssl.experiments.reproduction import Task
    from fedssl.experiments.scaling import scaled

    asked = repr(([each.name for each in cells], seconds, seeds, speeds.device))
    plan = out / "plans" / f"{hashlib.sha256(asked.encode()).hexdigest()[:16]}.json"
    if restart:
        plan.unlink(missing_ok=True)
    found = kept_fit(plan, lambda: fit(cells, seconds, seeds, speeds))
    note(f"scaled to take about {duration(found.seconds)} for {len(cells)} cells and {len(found.seeds)} seeds")
    if len(found.seeds) < len(seeds):
        note(f"the budget is enough for {len(found.seeds)} of {len(seeds)} seeds")
    return [Task(each, scaled(each, found.scale, speeds.device)) for each in cells], list(found.seeds)


def _changed(task: "Task", changes: Sequence[str]) -> "Task":
    from pydantic import ValidationError

    from fedssl.errors import SpecError
    from fedssl.experiments.reproduction import Task
    from fedssl.protocol.runs import RunSpec

    if not changes:
        return task
    values = task.spec.model_dump(mode="json")
    for change in changes:
        apply_change(values, change)
    try:
        return Task(task.cell, RunSpec.model_validate(values))
    except ValidationError as error:
        reasons = "\n".join(explain(error, RunSpec))
        raise SpecError(f"{task.cell.name} cannot be changed like this:\n{reasons}") from None


def _require_time(tasks: "Sequence[Task]", num_seeds: int, speeds: "Speeds", *, yes: bool) -> None:
    """Say how long the paper's own settings will take; more than an hour needs --yes."""
    from fedssl.experiments.budget import training_seconds

    seconds = num_seeds * sum(training_seconds(task.cell, task.spec, speeds) for task in tasks)
    if seconds == float("inf"):
        note("how long this takes is not known: the size of the data set is not")
        return
    note(f"this will take about {duration(seconds)}, and the judging on top of it")
    if seconds > LONG_SECONDS and not yes:
        raise UsageError(
            f"that is more than an hour ({duration(seconds)}): --budget 5m scales it down, --yes starts it"
        )


def _size(spec: "RunSpec") -> str:
    images = spec.partition.max_images if spec.partition is not None else None
    return (
        f"{spec.model.encoder.name}, {spec.num_rounds} rounds of {spec.training.local_epochs} epochs, "
        f"{'all' if images is None else f'{images:,}'} images"
    )


def _device_name(device: str, threads: int) -> str:
    import torch

    if device.startswith("cuda"):
        return str(torch.cuda.get_device_name(torch.device(device)))
    return f"{threads} CPU thread{'s' if threads > 1 else ''}"


def _numbers(text: str) -> list[int]:
    try:
        found = [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        found = []
    if not found:
        raise UsageError(f"--seeds {text}: write whole numbers with commas between them, such as 0,1,2")
    return found
