"""Running cells of the papers' tables, in full or scaled down to a budget."""

import dataclasses
import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from pydantic import ValidationError

from fedssl.cli.errors import UsageError
from fedssl.cli.machine import prepare as prepare_machine
from fedssl.cli.output import duration, note
from fedssl.cli.simulation_progress import simulation_progress
from fedssl.cli.specs import apply_change
from fedssl.errors import SpecError
from fedssl.experiments import papers
from fedssl.experiments.budget import Fit, Speeds, calibrated_fit, kept_fit, learns_little, training_seconds
from fedssl.experiments.papers import TableCell
from fedssl.experiments.pilot import Pilot, run_pilot
from fedssl.experiments.reproduction import (
    RESULTS,
    RUNS,
    CellResult,
    Task,
    place_datasets,
    prepare,
    require_no_loss,
    run_task,
)
from fedssl.experiments.runs import ComputeSettings
from fedssl.experiments.scaling import scaled
from fedssl.protocol.explanation import explain
from fedssl.protocol.runs import RunSpec
from fedssl.wording import plural

LONG_SECONDS = 3600


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """The experiment to run.

    If `budget_seconds` is None, the papers' own settings apply. `allow_long` runs it even if it takes over an hour.
    """

    what: str | None
    budget_seconds: float | None
    seeds: list[int]
    changes: Sequence[str]
    out: Path
    device: str
    jobs: str
    threads: int
    data_folder: Path | None
    allow_long: bool
    restart: bool
    dry_run: bool = False


def read_tasks(what: str | None, changes: Sequence[str]) -> list[Task]:
    """Return the cells with the papers' own settings and the changes. Raises SpecError."""
    return [_changed(Task(cell, cell.spec), changes) for cell in select_cells(what)]


def select_cells(what: str | None) -> list[TableCell]:
    """Return the cells that `what` selects, or all."""
    return [cell for name in ([what] if what else papers.tables()) for cell in papers.select(name)]


def run(request: Request) -> list[CellResult]:
    """Run the cells.

    Raises UsageError if they would take more than an hour and that was not allowed, and ResultsError, before anything
    is run, if results of other seeds would be lost.
    """
    cells = select_cells(request.what)
    datasets = {part.dataset for each in cells for part in (each.spec.partition, each.spec.central_evaluation) if part}
    machine = prepare_machine(request.device, request.threads, request.data_folder, datasets, request.jobs)
    speeds = Speeds(request.device, on_measuring=lambda text: note(f"measuring {text}"))
    tasks = read_tasks(request.what, request.changes)
    seeds = request.seeds
    place_datasets(tasks, machine.data_root)  # report missing data before anything is measured
    started, plan = time.monotonic(), None
    if request.budget_seconds is None:
        _require_time(tasks, len(seeds), speeds, allow_long=request.allow_long)
    else:
        plan = _plan(cells, request.budget_seconds, request, speeds, machine)
        seeds = list(plan.seeds)
        tasks = [_changed(Task(each, scaled(each, plan.scale, speeds.device)), request.changes) for each in cells]
    tasks = place_datasets(tasks, machine.data_root)
    for task in tasks:
        require_no_loss(task.cell, task.spec, seeds, request.out / RESULTS)
    if request.dry_run:
        for task in tasks:
            note(f"{task.cell.name}: {_size(task.spec)}")
        note("dry run: nothing was started")
        return []
    budget = None if plan is None or plan.calibration is None else dataclasses.asdict(plan.calibration)
    results = []
    for task in tasks:
        note(f"{task.cell.name}: {_size(task.spec)}")
        results.append(
            run_task(
                task,
                seeds,
                request.out,
                machine=machine,
                device_name=_device_name(machine, request.threads),
                display=simulation_progress,
                on_measuring=lambda name: note(f"measuring {name}"),
                restart=request.restart,
                budget=budget,
            )
        )
    if request.budget_seconds is not None:
        took, promised = duration(time.monotonic() - started), duration(request.budget_seconds)
        note(f"took {took} of the {promised} that --budget allowed, measurements included")
    return results


def _plan(
    cells: Sequence[TableCell], seconds: float, request: Request, speeds: Speeds, machine: ComputeSettings
) -> Fit:
    """Return the largest scale that fits, and the seeds that fit.

    The scale is kept in a file, so that the same command uses the same one when it is run again.
    """
    asked = repr(([each.name for each in cells], seconds, request.seeds, speeds.device, list(request.changes)))
    path = request.out / "plans" / f"{hashlib.sha256(asked.encode()).hexdigest()[:16]}.json"
    if request.restart:
        path.unlink(missing_ok=True)

    def adapt(cell: TableCell, spec: RunSpec) -> RunSpec:
        return _changed(Task(cell, spec), request.changes).spec

    def pilot(cell: TableCell, spec: RunSpec, longest_seconds: float) -> Pilot:
        note(f"measuring the first rounds of {cell.name}: {_size(spec)}")
        [task] = place_datasets([Task(cell, spec)], machine.data_root)
        seeded = task.spec.model_copy(update={"seed": request.seeds[0]})
        run = prepare(cell, seeded, request.out / RUNS, machine)
        return run_pilot(run.spec, machine, longest_seconds, run.clients, run.public)

    found = kept_fit(path, lambda: calibrated_fit(cells, seconds, request.seeds, speeds, pilot, adapt))
    if (measured := found.calibration) is not None:
        note(f"measured for {duration(measured.measuring)}: training takes {measured.training:.2f} times the first "
             f"estimate, an evaluation {measured.judging:.2f} times")  # fmt: skip
    note(f"scaled down to about {duration(found.seconds)} for {len(cells)} cells and {len(found.seeds)} seeds")
    if few := learns_little(cells, found.scale):
        note(
            f"{few[0]} trains on so few images that its encoder may stay at the level of the untrained one: give a "
            "larger --budget, or fewer cells"
        )
    if len(found.seeds) < len(request.seeds):
        note(f"the budget is enough for {len(found.seeds)} of {len(request.seeds)} seeds")
    return found


def _changed(task: Task, changes: Sequence[str]) -> Task:
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


def _require_time(tasks: Sequence[Task], num_seeds: int, speeds: Speeds, *, allow_long: bool) -> None:
    """Report how long the papers' own settings will take. Raises UsageError if that is too long and not allowed."""
    seconds = num_seeds * sum(training_seconds(task.cell, task.spec, speeds) for task in tasks)
    if seconds == float("inf"):
        note("the time that this will take is unknown, because the size of the data set is")
        return
    note(f"this will take about {duration(seconds)}, plus the time for evaluation")
    if seconds > LONG_SECONDS and not allow_long:
        raise UsageError(
            f"that is more than an hour ({duration(seconds)}): --budget 5m scales it down, --yes starts it"
        )


def _size(spec: RunSpec) -> str:
    images = spec.partition.max_images if spec.partition is not None else None
    epochs = "1 epoch" if spec.training.num_epochs == 1 else f"{spec.training.num_epochs:g} epochs"
    return (
        f"{spec.model.encoder.name}, {plural(spec.num_rounds, 'round')} of {epochs}, "
        f"{'all' if images is None else f'{images:,}'} images"
    )


def _device_name(machine: ComputeSettings, threads: int) -> str:
    if machine.device.startswith("cuda"):
        name = str(torch.cuda.get_device_name(torch.device(machine.device)))
    else:
        name = f"{threads} CPU thread{'s' if threads > 1 else ''}"
    return name if machine.jobs == 1 else f"{name}, {machine.jobs} processes"
