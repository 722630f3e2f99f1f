"""Cells that are really run, at a tiny size: digits in an .npz file named after CIFAR-10 stand in for it."""

import dataclasses
import itertools
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from fedssl.data import ImageData, load_dataset, save_npz
from fedssl.data.datasets import DATA_VARIABLE
from fedssl.errors import DataError, FolderInUseError, MethodError, ResultsError
from fedssl.experiments import measures, reproduction
from fedssl.experiments.checkpoints import run_key
from fedssl.experiments.measures import OnMeasuring
from fedssl.experiments.overlays import overlay
from fedssl.experiments.papers import TableCell, select
from fedssl.experiments.report import render
from fedssl.experiments.reproduction import (
    CellResult,
    Task,
    place_datasets,
    read_results,
    run_task,
    unfinished_seeds,
    write_result,
)
from fedssl.experiments.runs import SILENT, Calls, ComputeSettings, FinishedRun, find_finished, locked_folder
from fedssl.protocol.model import EncoderConfig
from fedssl.protocol.runs import RunSpec
from fedssl.run_files import RESULT, write_json

TINY: dict[str, Any] = {
    "num_rounds": 2,
    "model": {
        "encoder": EncoderConfig(widths=(8, 16)).model_dump(mode="json"),
        "projector": {"hidden_dims": [16], "out_dim": 16},
        "predictor": {"hidden_dims": [16], "out_dim": 16},
    },
    "data": {"image_size": 16},
    "training": {"local_epochs": 1, "batch_size": 32, "precision": "fp32"},
    "partition": {"max_images": 600},
    "evaluation": {"settings": "fast", "max_train": 300, "max_test": 200},
}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    train, test = (load_dataset("digits", split) for split in ("train", "test"))  # type: ignore[arg-type]
    colour = [ImageData(np.repeat(each.images, 3, axis=1), each.labels, each.class_names) for each in (train, test)]
    save_npz(folder / "cifar10.npz", *colour)
    return folder


@contextmanager
def silent(spec: RunSpec) -> Iterator[Calls]:
    yield SILENT


@contextmanager
def measuring_silently() -> Iterator[OnMeasuring]:
    yield lambda name, share: None


def tiny(name: str, root: Path, **changes: Any) -> Task:
    cell = select(name)[0]
    values = overlay(overlay(cell.spec.model_dump(mode="json"), TINY), changes)
    return place_datasets([Task(cell, RunSpec.model_validate(values))], root)[0]


def run(
    task: Task, root: Path, folder: Path, seeds: tuple[int, ...] = (0,), device: str = "1 CPU thread"
) -> CellResult:
    machine = ComputeSettings(data_root=root)
    return run_task(
        task, seeds, folder, machine=machine, device_name=device, display=silent, measuring=measuring_silently
    )


@pytest.mark.full
def test_published_and_measured_values_are_listed_with_the_differing_settings(root: Path, tmp_path: Path) -> None:
    task = tiny("fedx-1:SimCLR@cifar10", root, partition={"num_clients": 3})

    result = run(task, root, tmp_path, (0, 1))

    assert result.published == {"last": 51.31, "best": 52.88}
    assert [len(values) for values in result.measured.values()] == [2, 2]
    assert all(20 < value <= 100 for values in result.measured.values() for value in values)
    assert all(last <= best for last, best in zip(*result.measured.values(), strict=True))
    apart = {each.key: (each.paper, each.here) for each in result.differences}
    assert apart["num_rounds"] == (100, 2)
    assert apart["partition.num_clients"] == (10, 3)
    assert apart["model.encoder.name"] == ("resnet18", "convnet")
    assert apart["evaluation.settings"] == ("fedx", "fast")
    assert not {"name", "seed", "partition.seed"} & apart.keys()


@pytest.mark.full
def test_the_public_clients_images_are_shared_and_it_does_not_train(root: Path, tmp_path: Path) -> None:
    reducer = {"num_epochs": 2, "num_anchors": 16, "batch_size": 8}
    task = tiny("flesd-1:FLESD@cifar10-a100", root, method={"reducer": reducer})

    result = run(task, root, tmp_path)

    assert result.measured["probe"][0] > 20
    assert "public_data.num_images" not in {each.key for each in result.differences}
    (folder,) = (tmp_path / "runs").iterdir()
    history = (folder / "history.json").read_text()
    assert '"client-1"' in history
    assert '"client-0"' not in history


@pytest.mark.full
def test_crops_of_imagenet_100_come_from_whole_image_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The images of the public client are squares in memory, like all public images."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    drawn = np.random.default_rng(0)
    for split, name, each in itertools.product(("train", "val"), ("a", "b"), range(30)):
        place = tmp_path / "imagenet-100" / split / name
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(drawn.integers(0, 256, (30, 40, 3), np.uint8)).save(place / f"{each}.png")
    few = {
        "data": {"image_size": 16, "cache_size": 20},
        "partition": {"num_clients": 3, "max_images": None},
        "cohort": {"clients": ["client-1", "client-2"], "min_clients": 2},
        "training": {"batch_size": 4},
        "method": {"reducer": {"num_epochs": 1, "num_anchors": 8, "batch_size": 4}},
        "evaluation": {"max_train": None, "max_test": None},
    }

    result = run(tiny("flesd-1:FLESD@imagenet-100-a100", tmp_path, **few), tmp_path, tmp_path)

    assert 0 < result.measured["probe"][0] <= 100
    assert (tmp_path / "cache" / "fedssl" / "images").is_dir()


@pytest.mark.full
def test_a_public_client_with_few_images_has_a_smaller_queue(root: Path, tmp_path: Path) -> None:
    """At alpha 0.01 some seeds leave client-0 with fewer images than the paper's queue holds."""
    reducer = {"num_epochs": 2, "num_anchors": 256, "batch_size": 8}
    task = tiny("flesd-1:FLESD@cifar10-a100", root, method={"reducer": reducer}, public_data={"num_images": 300})

    result = run(task, root, tmp_path)

    assert result.measured["probe"][0] > 20
    assert "seed 0: client-0 holds" in result.notes[-1]
    assert "and the queue 16 instead of 256" in result.notes[-1] or "and the queue 32 in" in result.notes[-1]


@pytest.mark.full
def test_fine_tuning_is_measured_once_and_stored(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quick = dataclasses.replace(measures.FINE_TUNINGS["ssd"], epochs=2, evaluate_every=1)
    monkeypatch.setattr(measures, "FINE_TUNINGS", {"ssd": quick, "fedrlc": quick})
    task = tiny("ssd-1:SSD@cifar10-k10", root, partition={"num_clients": 3})
    first = run(task, root, tmp_path)

    def never(*_: Any, **__: Any) -> None:
        pytest.fail("it was measured before")

    monkeypatch.setattr(measures, "semi_supervised", never)
    again = run(task, root, tmp_path)

    assert first.measured.keys() == {"probe", "1%", "10%"}
    assert again.measured == first.measured


@pytest.mark.full
def test_a_table_that_needs_the_same_run_does_not_train_it_again(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quick = dataclasses.replace(measures.FINE_TUNINGS["ssd"], epochs=1, hidden_dim=None)
    monkeypatch.setattr(measures, "FINE_TUNINGS", {"ssd": quick})
    changes = {"partition": {"num_clients": 3}}
    first = run(tiny("ssd-1:FedAlignUniform@cifar10-k10", root, **changes), root, tmp_path)
    second = run(tiny("ssd-3:FedAlignUniform@cifar10-k10", root, **changes), root, tmp_path)

    assert len(list((tmp_path / "runs").iterdir())) == 1
    assert first.measured["1%"] == second.measured["1%"]


@pytest.mark.full
def test_a_semi_supervised_cell_is_tuned_on_images_that_no_client_had(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quick = dataclasses.replace(measures.FINE_TUNINGS["fedrlc"], epochs=1, hidden_dim=None)
    monkeypatch.setattr(measures, "FINE_TUNINGS", {"fedrlc": quick})
    sizes = []
    tune = measures.fine_tune

    def spy(encoder: Any, train: ImageData, *args: Any, **options: Any) -> Any:
        sizes.append(len(train))
        return tune(encoder, train, *args, **options)

    monkeypatch.setattr(measures, "fine_tune", spy)
    linear = run(tiny("fedrlc-1:Single@cifar10-class", root), root, tmp_path)
    tuned = run(tiny("fedrlc-3:Single@cifar10-class", root), root, tmp_path)

    assert (linear.measured.keys(), tuned.measured.keys()) == ({"probe"}, {"10%"})
    assert len(list((tmp_path / "runs").iterdir())) == 2, "they train on different images"
    assert len(list((tmp_path / "runs").glob("*/encoder-client-*.safetensors"))) == 10
    assert len(sizes) == 5
    assert set(sizes) == {30}, "10 % of max_train"


@pytest.mark.full
def test_the_classifier_of_a_supervised_run_is_tested(root: Path, tmp_path: Path) -> None:
    changes = {"training": {"local_epochs": 5, "optimizer": {"learning_rate": 0.1}}, "partition": {"max_images": 1200}}
    result = run(tiny("fedu-1:FedAvg supervised R50@cifar10-iid", root, **changes), root, tmp_path)

    assert 30 < result.measured["accuracy"][0] <= 100  # of ten classes


@pytest.mark.full
def test_min_local_reports_its_worst_client(root: Path, tmp_path: Path) -> None:
    mean = run(tiny("fedrlc-1:Single@cifar10-class", root), root, tmp_path)
    worst = run(tiny("flesd-1:Min-Local@cifar10-a100", root), root, tmp_path)

    assert 0 < worst.measured["probe"][0] < 100
    assert 0 < mean.measured["probe"][0] < 100
    (folder,) = (tmp_path / "runs").glob("flesd-*")
    assert '"probe_min"' in (folder / "result.json").read_text()


@pytest.mark.full
def test_a_figure_about_clients_keeps_and_measures_their_models(root: Path, tmp_path: Path) -> None:
    supervised = run(tiny("flesd-fig2:Supervised@cifar10-a100", root), root, tmp_path)
    angles = run(tiny("fedx-fig6:FedSimCLR", root), root, tmp_path)

    assert supervised.published == {"classifier": 73.0, "probe": 73.5}
    assert all(0 < value <= 100 for values in supervised.measured.values() for value in values)
    assert len(list((tmp_path / "runs").glob("flesd-*-clients/clients/*.safetensors"))) == 6
    assert angles.measured.keys() == angles.published.keys()
    assert all(0 < value < 180 for values in angles.measured.values() for value in values)
    assert "| local-global angle | drawn |" in render([angles])


def test_missing_data_sets_are_named_with_where_to_get_them(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(DATA_VARIABLE, raising=False)
    tasks = [Task(cell, cell.spec) for name in ("fedx-1:SimCLR", "ssd-2:SSD") for cell in select(name)]

    with pytest.raises(DataError) as caught:
        place_datasets(tasks, root)

    said = str(caught.value)
    for text in ("SVHN", "CIFAR-100", "Tiny-ImageNet", "http", "--data-folder", "Found here: "):
        assert text in said
    assert "CIFAR-10:" not in said
    assert "CIFAR-10" in said.partition("Found here: ")[2]


def test_an_npz_file_of_the_data_sets_name_is_used_and_reported_as_a_difference(root: Path) -> None:
    task = tiny("fedx-1:SimCLR@cifar10", root)

    assert task.spec.partition is not None
    assert task.spec.partition.dataset == str(root / "cifar10.npz")
    assert "partition.dataset" in {each.key for each in task.differences}


def made(cell: TableCell, *values: float, **changes: Any) -> CellResult:
    result = CellResult(
        table=cell.table, row=cell.row, column=cell.column, published=cell.published,
        measured=dict.fromkeys(cell.published, values), seeds=tuple(range(len(values))), differences=(),
        notes=cell.notes, device="a GPU", seconds=90.0,
    )  # fmt: skip
    return dataclasses.replace(result, **changes)


def test_the_report_is_a_table_with_its_settings_below() -> None:
    first, second = (select(name)[0] for name in ("ssd-4:proj +DSR", "ssd-4:noproj +DSR"))

    text = render([made(first, 80.0, 82.0), made(second, 77.0)])

    assert "## ssd-4: with and without a projector" in text
    # 81.05 is published; 80 and 82 have the mean 81 and a sample deviation of the root of 2. This row has the second
    # settings: only it has a note about the projector.
    assert "| proj +DSR | cifar10-k10 | probe | 81.05 | 81.00 ± 1.41 | -0.05 | 2 | 2 min | 2 |" in text
    assert text.count("the paper calls it linear") == 1
    assert text.index("noproj +DSR") < text.index("| proj +DSR"), "rows are in the paper's order"
    assert "Run: 2 of 4 cells." in text
    assert render([]) == "There are no results yet.\n"


@pytest.mark.full
def test_the_report_names_files_without_their_folders(root: Path, tmp_path: Path) -> None:
    run(tiny("fedx-1:SimCLR@cifar10", root, partition={"num_clients": 3}), root, tmp_path)

    text = render(read_results(tmp_path))

    assert "`partition.dataset` cifar10.npz (own files) (paper: cifar10)" in text
    assert str(root) not in text


class Runs:
    """Takes the place of training: a run at seed S takes 10 s, and its probe is S %. Runs may fail at some seeds."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.trained: list[int] = []
        self.failing: set[int] = set()
        monkeypatch.setattr(reproduction, "run_in_folder", self.run)

    def run(self, spec: RunSpec, folder: Path, **_: Any) -> FinishedRun:
        if (found := find_finished(spec, folder)) is not None:
            return found
        if spec.seed in self.failing:
            raise MethodError(f"seed {spec.seed} diverged")
        self.trained.append(spec.seed)
        document = {"num_rounds": 1, "num_images": 1, "bytes_down": 1, "bytes_up": 1, "seconds": 10.0, "losses": []}
        document |= {"evaluations": {"1": {"probe": spec.seed / 100}}, "megabytes_by_round": {"1": 1.0}}
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / RESULT, {"key": run_key(spec), **document})
        found = find_finished(spec, folder)
        assert found is not None
        return found


def test_each_seed_is_stored_when_it_ends_and_one_that_fails_loses_nothing(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs, task = Runs(monkeypatch), tiny("fedx-1:SimCLR@cifar10", root)
    runs.failing = {3}

    with pytest.raises(MethodError, match="seed 3 diverged"):
        run(task, root, tmp_path, (1, 2, 3))
    [so_far] = read_results(tmp_path)
    assert (so_far.seeds, so_far.seconds, so_far.device) == ((1, 2), 20.0, "1 CPU thread")
    assert so_far.measured == {"last": (1.0, 2.0), "best": (1.0, 2.0)}
    assert unfinished_seeds(task, [1, 2, 3], tmp_path, ComputeSettings(data_root=root)) == [3]

    runs.failing = set()
    run(task, root, tmp_path, (1, 2, 3), device="a GPU")
    [complete] = read_results(tmp_path)
    assert (complete.seeds, complete.device, runs.trained) == ((1, 2, 3), "1 CPU thread, a GPU", [1, 2, 3])


def test_results_of_more_seeds_stay_until_all_of_them_are_there_again(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs, task = Runs(monkeypatch), tiny("fedx-1:SimCLR@cifar10", root)
    first = run(task, root, tmp_path, (1, 2))
    runs.failing = {3}

    with pytest.raises(MethodError):
        run(task, root, tmp_path, (1, 3, 2))
    assert read_results(tmp_path) == [first]


def test_a_restart_trains_again_and_forgets_the_measures_and_the_device(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs, task = Runs(monkeypatch), tiny("fedx-1:SimCLR@cifar10", root)
    run(task, root, tmp_path, (1,), device="a GPU")
    assert run(task, root, tmp_path, (1,), device="another GPU").device == "a GPU", "it was only read"
    (folder,) = (tmp_path / "runs").iterdir()
    (folder / "measures.json").write_text("{}")

    machine = ComputeSettings(data_root=root)
    again = run_task(
        task, (1,), tmp_path, machine=machine, device_name="another GPU", display=silent, measuring=measuring_silently,
        restart=True,
    )  # fmt: skip

    assert again.device == "another GPU"
    assert runs.trained == [1, 1]
    assert not (folder / "measures.json").exists()


def test_a_cells_notes_name_a_seed_that_several_versions_have_computed(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Runs(monkeypatch)
    task = tiny("fedx-1:SimCLR@cifar10", root)
    assert not any("versions of fedssl's code" in note for note in run(task, root, tmp_path, (1,)).notes)
    (result,) = (tmp_path / "runs").glob("*/result.json")
    result.write_text(
        json.dumps({**json.loads(result.read_text()), "sources": ["0123456789abcdef", "fedcba9876543210"]})
    )

    notes = run(task, root, tmp_path, (1,)).notes

    assert [note for note in notes if note.startswith("seed 1: 2 versions of fedssl's code compute this run")]


def test_a_run_is_measured_by_one_command_at_a_time(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two processes that write the same file of measures can each find half of the other's, or lose their own."""
    Runs(monkeypatch)
    task, measured = tiny("fedx-1:SimCLR@cifar10", root), list[Path]()

    def measure_cell(cell: Any, spec: Any, finished: Any, folder: Path, *_: Any) -> dict[str, float]:
        with pytest.raises(FolderInUseError), locked_folder(folder):
            pass
        measured.append(folder)
        return dict.fromkeys(cell.published, 1.0)

    monkeypatch.setattr(reproduction, "measure_cell", measure_cell)
    run(task, root, tmp_path)
    with locked_folder(measured[0]), pytest.raises(FolderInUseError):
        run(task, root, tmp_path)
    assert len(measured) == 1


def test_a_result_does_not_replace_seeds_that_were_written_meanwhile(tmp_path: Path) -> None:
    cell = select("fedx-1:SimCLR@cifar10")[0]
    path = write_result(made(cell, 50.0, 51.0), cell.spec, tmp_path)
    before = path.read_bytes()

    with pytest.raises(ResultsError, match="has the results of seeds 0,1, which would be lost: give --seeds 0,1,2"):
        write_result(made(cell, 52.0, seeds=(2,)), cell.spec, tmp_path)
    assert path.read_bytes() == before
    write_result(made(cell, 50.0, 51.0, 52.0), cell.spec, tmp_path)
