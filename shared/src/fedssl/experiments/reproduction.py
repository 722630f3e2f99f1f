"""Run cells of the papers' tables, and store the results together with the published numbers."""

import hashlib
import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from fedssl.data import ImageData, find_dataset, how_to_get
from fedssl.data.catalogue import KNOWN
from fedssl.data.image_cache.build import CachedData
from fedssl.data.partitioning import partition_images
from fedssl.errors import DataError, ResultsError
from fedssl.experiments.checkpoints import run_key
from fedssl.experiments.measures import OnMeasuring, measure_cell
from fedssl.experiments.overlays import Values, changed, differences
from fedssl.experiments.papers import TableCell
from fedssl.experiments.runs import (
    Calls,
    ComputeSettings,
    FinishedRun,
    clear,
    find_finished,
    locked_folder,
    run_in_folder,
)
from fedssl.experiments.scaling import fitting_queue
from fedssl.protocol.methods.distillation import DistillationConfig
from fedssl.protocol.runs import RunSpec
from fedssl.run_files import DEVICE, read_json, write_json

RUNS, RESULTS = "runs", "results"

_UNSAID = ("name", "seed", "partition.seed")  # no paper publishes its seeds


@dataclass(frozen=True, slots=True)
class Difference:
    """One setting that differs from the paper's."""

    key: str
    paper: Any
    here: Any


@dataclass(frozen=True, slots=True)
class Task:
    """A cell with the spec that is run for it, which may be scaled down or changed by hand."""

    cell: TableCell
    spec: RunSpec

    @property
    def differences(self) -> tuple[Difference, ...]:
        """The settings in which the spec differs from the paper's, without seeds."""
        found = differences(self.cell.spec.model_dump(mode="json"), self.spec.model_dump(mode="json"))
        unsaid = (*_UNSAID, *(("public_data.num_images",) if self.cell.public_client else ()))
        return tuple(Difference(*each) for each in found if each[0] not in unsaid)


@dataclass(frozen=True, slots=True)
class CellResult:
    """The result of a cell.

    Attributes:
        published: the paper's numbers by measure, None if the paper only draws one.
        measured: one value per seed, by measure.
        device: the device, or those of different seeds, on which the runs ended.
        seconds: the training time of all seeds together.
        budget: with a budget, its seconds and what was measured before the scale was chosen.
    """

    table: str
    row: str
    column: str
    published: Mapping[str, float | None]
    measured: Mapping[str, tuple[float, ...]]
    seeds: tuple[int, ...]
    differences: tuple[Difference, ...]
    notes: tuple[str, ...]
    device: str
    seconds: float
    budget: Mapping[str, float] | None = None


def place_datasets(tasks: Sequence[Task], root: Path | None, *, downloaded_later: Set[str] = frozenset()) -> list[Task]:
    """Return the tasks with the place of every data set, as :func:`dataset_places`. Raises DataError.

    Data sets that will be `downloaded_later` may be missing.
    """
    places = dataset_places({name for task in tasks for name in _datasets(task)} - downloaded_later, root)
    return [Task(task.cell, _placed(task.spec, places)) for task in tasks]


def dataset_places(names: Collection[str], root: Path | None) -> dict[str, str]:
    """Return where each known data set is: its name, or the path of an image folder or .npz file in `root`.

    Raises DataError if one is missing. The message explains where to get it and which ones were found.
    """
    places = {name: _place(name, root) for name in sorted(names)}
    if missing := [name for name, place in places.items() if place is None]:
        wanted = "; ".join(f"{KNOWN[name].title}: {how_to_get(KNOWN[name])}" for name in missing)
        here = [known.title for name, known in KNOWN.items() if _place(name, root) is not None]
        raise DataError(
            f"missing data: {wanted}. Or put a folder of images or an .npz file with the data set's name into a "
            f"folder, and pass that as --data-folder. Found here: {', '.join(here)}"
        )
    return {name: place for name, place in places.items() if place is not None}


def run_task(
    task: Task,
    seeds: Sequence[int],
    folder: Path,
    *,
    machine: ComputeSettings,
    device_name: str,
    display: Callable[[RunSpec], AbstractContextManager[Calls]],
    measuring: Callable[[], AbstractContextManager[OnMeasuring]],
    restart: bool = False,
    budget: Mapping[str, float] | None = None,
) -> CellResult:
    """Run a cell at every seed that is not finished, and store the results in `folder`.

    The results so far are stored after each seed, unless the folder has those of further seeds from before. Cells with
    the same spec share their runs. With `restart`, finished and interrupted runs start again. Raises FolderInUseError
    if another command runs or measures one of them, the errors of a run, and ResultsError as :func:`write_result`.
    """
    found = CellResult(
        table=task.cell.table,
        row=task.cell.row,
        column=task.cell.column,
        published=task.cell.published,
        measured=dict.fromkeys(task.cell.published, ()),
        seeds=(),
        differences=task.differences,
        notes=task.cell.notes,
        device="",
        seconds=0.0,
        budget=budget,
    )
    devices = list[str]()
    for seed in seeds:
        run = prepare(task.cell, _seeded(task.spec, seed), folder / RUNS, machine)
        if restart:
            clear(run.folder)
        with locked_folder(run.folder):  # until the measures are stored: another command would compute them as well
            is_finished = find_finished(run.spec, run.folder) is not None
            with display(run.spec) as calls:
                finished = run_in_folder(
                    run.spec,
                    run.folder,
                    machine=machine,
                    calls=calls,
                    clients=run.clients,
                    public=run.public,
                    keep_clients=task.cell.keeps_clients,
                    is_locked=True,
                )
            devices.append(_kept_device(run.folder, device_name, is_finished=is_finished))
            with measuring() as on_measuring:
                measures = measure_cell(task.cell, run.spec, finished, run.folder, machine, on_measuring)
        found = replace(
            found,
            measured={name: (*values, measures[name]) for name, values in found.measured.items()},
            seeds=(*found.seeds, seed),
            notes=(*found.notes, *(each for each in (run.note, _mixed(seed, finished)) if each is not None)),
            device=", ".join(dict.fromkeys(devices)),
            seconds=found.seconds + finished.seconds,
        )
        if seed == seeds[-1] or not lost_seeds(found, task.spec, found.seeds, folder / RESULTS):
            write_result(found, task.spec, folder / RESULTS)
    return found


def _mixed(seed: int, finished: FinishedRun) -> str | None:
    return None if finished.mixed is None else f"seed {seed}: {finished.mixed}"


def _kept_device(folder: Path, here: str, *, is_finished: bool) -> str:
    """Return the device of a run. It is stored when the run ends, because a later command may only read the run."""
    if is_finished:
        return str((read_json(folder / DEVICE) or {}).get("device", here))  # an earlier version stored none
    write_json(folder / DEVICE, {"device": here})
    return here


@dataclass(frozen=True, slots=True)
class PreparedRun:
    """One seed's run: its final spec, its folder, its images if they are not the partition's, and a note."""

    spec: RunSpec
    folder: Path
    clients: dict[str, ImageData | CachedData] | None
    public: ImageData | None
    note: str | None


def prepare(cell: TableCell, spec: RunSpec, folder: Path, machine: ComputeSettings) -> PreparedRun:
    """Return what one run of a cell needs, with its images if a client's are public. Raises DataError."""
    clients = public = note = None
    if cell.public_client is not None and spec.partition is not None:
        clients = dict(partition_images(spec.partition, spec.data, machine.data_root))
        public = _squares(clients.pop(cell.public_client))
        values: Values = {"public_data": {"num_images": len(public)}}
        reducer = spec.method.reducer
        if isinstance(reducer, DistillationConfig) and len(public) <= reducer.num_anchors:
            queue = fitting_queue(reducer, len(public))
            values["method"] = {"reducer": queue}
            note = (
                f"seed {spec.seed}: {cell.public_client} holds {len(public)} images, and the queue "
                f"{queue['num_anchors']} instead of {reducer.num_anchors}"
            )
        spec = changed(spec, values)
    name = re.sub("[^a-z0-9.+-]+", "-", spec.name.lower())
    kept = "-clients" if cell.keeps_clients else ""  # a run that did not keep them has to be trained again
    place = folder / f"{name}-seed{spec.seed}-{run_key(spec)[:12]}{kept}"
    return PreparedRun(spec, place, clients, public, note)


def _squares(images: ImageData | CachedData) -> ImageData:
    """Return images that are in memory: public ones always are."""
    return images.squares(np.arange(len(images))) if isinstance(images, CachedData) else images


def lost_seeds(cell: TableCell | CellResult, spec: RunSpec, seeds: Sequence[int], folder: Path) -> list[int]:
    """Return the seeds whose results in `folder` would be lost if results of the cell at `seeds` replaced them."""
    path = _result_path(cell, spec, folder)
    return [seed for seed in _parse(path).seeds if seed not in seeds] if path.exists() else []


def require_no_loss(cell: TableCell | CellResult, spec: RunSpec, seeds: Sequence[int], folder: Path) -> None:
    """Raise ResultsError if results of the cell at these seeds would replace those of other seeds in `folder`."""
    if lost_seeds(cell, spec, seeds, folder):
        path = _result_path(cell, spec, folder)
        others = _parse(path).seeds
        known, wanted = (",".join(map(str, each)) for each in (others, sorted({*others, *seeds})))
        raise ResultsError(
            f"{path} has the results of seeds {known}, which would be lost: give --seeds {wanted}, which only reads "
            "the runs that are finished, or another folder as --out"
        )


def unfinished_seeds(task: Task, seeds: Sequence[int], folder: Path, machine: ComputeSettings) -> list[int]:
    """Return the seeds at which the cell's run in `folder` is not finished. Reads no images.

    If a client's images are public, all seeds are returned, because the run's folder depends on these images.
    """
    if task.cell.public_client is not None:
        return list(seeds)
    runs = {seed: prepare(task.cell, _seeded(task.spec, seed), folder / RUNS, machine) for seed in seeds}
    return [seed for seed, run in runs.items() if find_finished(run.spec, run.folder) is None]


def write_result(result: CellResult, spec: RunSpec, folder: Path) -> Path:
    """Write a cell's result as JSON, in a file named by the cell and its settings. Returns the file.

    Raises ResultsError if the file has the results of seeds that this result lacks.
    """
    require_no_loss(result, spec, result.seeds, folder)  # another command may have written it meanwhile
    path = _result_path(result, spec, folder)
    folder.mkdir(parents=True, exist_ok=True)
    document = {each: getattr(result, each) for each in CellResult.__slots__}
    document["differences"] = [[each.key, each.paper, each.here] for each in result.differences]
    write_json(path, {**document, "spec": spec.model_dump(mode="json")})
    return path


def _result_path(cell: TableCell | CellResult, spec: RunSpec, folder: Path) -> Path:
    text = json.dumps(_seeded(spec, 0).model_dump(mode="json"), sort_keys=True)
    name = re.sub("[^A-Za-z0-9.+@-]+", "_", f"{cell.table}-{cell.row}@{cell.column}")
    return folder / f"{name}-{hashlib.sha256(text.encode()).hexdigest()[:8]}.json"


def read_results(folder: Path) -> list[CellResult]:
    """Return all results in a folder, in the order of their files' names. Raises ResultsError."""
    return [_parse(path) for path in sorted((folder / RESULTS).glob("*.json"))]


def _parse(path: Path) -> CellResult:
    document = read_json(path) or {}
    try:
        return CellResult(
            table=document["table"],
            row=document["row"],
            column=document["column"],
            published=document["published"],
            measured={
                name: tuple(float("nan") if value is None else float(value) for value in values)
                for name, values in document["measured"].items()
            },
            seeds=tuple(document["seeds"]),
            differences=tuple(Difference(*each) for each in document["differences"]),
            notes=tuple(document["notes"]),
            device=document["device"],
            seconds=document["seconds"],
            budget=document.get("budget"),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ResultsError(f"{path} is not a cell's result ({error!r}): remove it") from error


def _seeded(spec: RunSpec, seed: int) -> RunSpec:
    return changed(spec, {"seed": seed, "partition": {"seed": seed}})


def _datasets(task: Task) -> set[str]:
    """Return the known data sets that a task reads."""
    spec = task.spec
    found = {part.dataset for part in (spec.partition, spec.central_evaluation) if part is not None}
    if spec.public_data is not None and task.cell.public_client is None:
        found.add(spec.public_data.dataset)
    return {name for name in found if name in KNOWN}


def _place(name: str, root: Path | None) -> str | None:
    """Return the name of a known data set, or its path in `root`, whichever is found; None if it is missing."""
    if KNOWN[name].find is None or all(find_dataset(name, split, root) for split in ("train", "test")):
        return name
    for candidate in () if root is None else (root / name, root / f"{name}.npz"):
        if candidate.is_file() or (candidate / "train").is_dir():
            return str(candidate)
    return None


def _placed(spec: RunSpec, places: Mapping[str, str]) -> RunSpec:
    values: Values = {}
    for section in ("partition", "evaluation", "public_data"):
        part = getattr(spec, section)
        if part is not None and (place := places.get(part.dataset)) not in (None, part.dataset):
            values[section] = {"dataset": place}
    return changed(spec, values) if values else spec
