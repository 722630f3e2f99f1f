"""Running cells of the papers' tables, in full or scaled down to a budget."""

import dataclasses
import hashlib
import time
from collections.abc import Iterator, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from pydantic import ValidationError

from fedssl.cli.destinations import require_folder
from fedssl.cli.errors import UsageError
from fedssl.cli.machine import prepare as prepare_machine
from fedssl.cli.machine import would_be_downloaded
from fedssl.cli.output import duration, note
from fedssl.cli.simulation_progress import simulation_progress
from fedssl.cli.specs import apply_change
from fedssl.cli.step_progress import step_progress
from fedssl.cores import num_usable_cores
from fedssl.errors import SpecError
from fedssl.experiments import papers
from fedssl.experiments.budget import Fit, Speeds, calibrated_fit, fit, kept_fit, learns_little, training_seconds
from fedssl.experiments.jobs import FAILURES
from fedssl.experiments.measures import OnMeasuring
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
    unfinished_seeds,
)
from fedssl.experiments.runs import ComputeSettings, locked_folder
from fedssl.experiments.scaling import scaled
from fedssl.protocol.explanation import explain
from fedssl.protocol.runs import RunSpec
from fedssl.wording import plural, reason_of

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
    return [cell for name in (papers.tables() if what is None else [what]) for cell in papers.select(name)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The cells that were asked for, with the seeds, the results of those that ended, and the reasons of those that
    failed, by the cell's name."""

    tasks: Sequence[Task]
    seeds: Sequence[int]
    seconds: float | None
    results: list[CellResult] = field(default_factory=list)
    failures: dict[str, str] = field(default_factory=dict)


def run(request: Request) -> Outcome:
    """Run the cells. If there are several, one that fails does not end the others.

    Raises UsageError if they would take more than an hour and that was not allowed, ResultsError, before anything is
    run, if results of other seeds would be lost, and the error of a single cell.
    """
    cells = select_cells(request.what)
    require_folder("--out", request.out)
    datasets = {part.dataset for each in cells for part in (each.spec.partition, each.spec.central_evaluation) if part}
    missing = would_be_downloaded(datasets, request.data_folder) if request.dry_run else set[str]()
    wanted = set[str]() if request.dry_run else datasets
    machine = prepare_machine(request.device, request.threads, request.data_folder, wanted, request.jobs)
    speeds = Speeds(
        request.device,
        _num_at_once(machine, request.threads),
        on_measuring=lambda text: note(f"measuring {text}"),
    )
    tasks = read_tasks(request.what, request.changes)
    seeds = request.seeds
    # Report missing data before anything is measured.
    placed = place_datasets(tasks, machine.data_root, downloaded_later=missing)
    started, plan = time.monotonic(), None
    if request.budget_seconds is None:
        left = [
            len(seeds if request.restart else unfinished_seeds(each, seeds, request.out, machine)) for each in placed
        ]
        seconds = _require_time(tasks, left, speeds, allow_long=request.allow_long or request.dry_run)
    else:
        plan = _plan(cells, request.budget_seconds, request, speeds, machine, missing)
        seeds, seconds = list(plan.seeds), plan.seconds
        tasks = [_changed(Task(each, scaled(each, plan.scale, speeds.device)), request.changes) for each in cells]
        placed = place_datasets(tasks, machine.data_root, downloaded_later=missing)
    for task in placed:
        require_no_loss(task.cell, task.spec, seeds, request.out / RESULTS)
    outcome = Outcome(tasks=placed, seeds=seeds, seconds=seconds)
    if request.dry_run:
        return outcome
    budget = None if plan is None or plan.calibration is None else dataclasses.asdict(plan.calibration)
    for task in placed:
        note(f"{task.cell.name}: {size_of(task.spec)}")
        try:
            result = run_task(
                task,
                seeds,
                request.out,
                machine=machine,
                device_name=_device_name(machine, request.threads),
                display=simulation_progress,
                measuring=_measuring_progress,
                restart=request.restart,
                budget=budget,
            )
        except FAILURES as error:
            if len(placed) == 1:
                raise
            outcome.failures[task.cell.name] = reason_of(error)
            note(f"{task.cell.name} failed: {reason_of(error)}")
        except KeyboardInterrupt:
            note("interrupted: run the same command again to keep what is finished and continue with the rest")
            raise
        else:
            outcome.results.append(result)
    if request.budget_seconds is not None:
        took, promised = duration(time.monotonic() - started), duration(request.budget_seconds)
        note(f"took {took} of the {promised} that --budget allowed, measurements included")
    return outcome


@contextmanager
def _measuring_progress() -> Iterator[OnMeasuring]:
    with step_progress() as report:
        yield lambda name, share: report(f"measuring {name}", share)


def _plan(
    cells: Sequence[TableCell],
    seconds: float,
    request: Request,
    speeds: Speeds,
    machine: ComputeSettings,
    missing: Set[str],
) -> Fit:
    """Return the largest scale that fits, and the seeds that fit.

    The scale is kept in a file, so that the same command uses the same one when it is run again. Without the `missing`
    images, it is only estimated, and not kept. Raises FolderInUseError if another process makes the same plan.
    """
    asked: tuple[object, ...] = ([each.name for each in cells], seconds, request.seeds, speeds.device)
    asked += (list(request.changes),)
    if (at_once := (speeds.num_processes, request.threads)) != (1, 1):
        asked += at_once
    path = request.out / "plans" / f"{hashlib.sha256(repr(asked).encode()).hexdigest()[:16]}.json"

    def adapt(cell: TableCell, spec: RunSpec) -> RunSpec:
        return _changed(Task(cell, spec), request.changes).spec

    def pilot(cell: TableCell, spec: RunSpec, longest_seconds: float) -> Pilot:
        note(f"measuring the first rounds of {cell.name}: {size_of(spec)}")
        [task] = place_datasets([Task(cell, spec)], machine.data_root)
        seeded = task.spec.model_copy(update={"seed": request.seeds[0]})
        run = prepare(cell, seeded, request.out / RUNS, machine)
        return run_pilot(run.spec, machine, longest_seconds, run.clients, run.public)

    if missing:
        note("the first rounds are measured once the data sets are downloaded, and may then change the scale")
        found = fit(cells, seconds, request.seeds, speeds, adapt)
    else:
        with locked_folder(path.with_suffix("")):
            if request.restart:
                path.unlink(missing_ok=True)
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


def _require_time(tasks: Sequence[Task], num_seeds: Sequence[int], speeds: Speeds, *, allow_long: bool) -> float | None:
    """Report and return how long the papers' own settings will take for each task's seeds; None if that is unknown.

    Raises UsageError if that is too long and not allowed.
    """
    due = [(task, count) for task, count in zip(tasks, num_seeds, strict=True) if count]
    seconds = sum(count * training_seconds(task.cell, task.spec, speeds) for task, count in due)
    if seconds == float("inf"):
        note("the time that this will take is unknown, because the size of the data set is")
        return None
    if not due:
        note("all runs are finished: only measures that are missing will be computed")
        return 0.0
    together = "" if speeds.num_processes == 1 else f" with up to {speeds.num_processes} clients at a time"
    note(f"this will take about {duration(seconds)}{together}, plus the time for evaluation")
    if seconds > LONG_SECONDS and not allow_long:
        raise UsageError(
            f"that is more than an hour ({duration(seconds)}): --budget 5m scales it down, --yes starts it"
        )
    return seconds


def _num_at_once(machine: ComputeSettings, threads: int) -> int:
    """Return how many of the processes can train at the same time without slowing each other down.

    Several on one GPU take turns. With NVIDIA's MPS, two were 1.4 times as fast as one, which is not counted.
    """
    if machine.device.startswith("cuda"):
        places = torch.cuda.device_count() if machine.device == "cuda" else 1
    else:
        places = num_usable_cores() // threads
    return min(machine.jobs, max(1, places))


def size_of(spec: RunSpec) -> str:
    """Return the size of a run as text: its encoder, rounds, epochs and images."""
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
