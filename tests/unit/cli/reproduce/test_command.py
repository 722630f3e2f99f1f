"""The command `fedssl reproduce`, run in this process."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import yaml

from fedssl.cli.reproduce import steps
from fedssl.cli.reproduce.command import seconds_of
from fedssl.data import ImageData, load_dataset, save_npz
from fedssl.errors import MethodError
from fedssl.experiments import budget
from fedssl.experiments.papers import select
from fedssl.experiments.reproduction import CellResult, Task
from fedssl.experiments.scaling import Scale
from fedssl.protocol.runs import RunSpec
from support.commands import fedssl


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of data sets in which the digits replace CIFAR-10."""
    folder = tmp_path_factory.mktemp("data")
    splits = [load_dataset("digits", split) for split in ("train", "test")]  # type: ignore[arg-type]
    save_npz(folder / "cifar10.npz", *(ImageData(np.repeat(s.images, 3, axis=1), s.labels) for s in splits))
    return folder


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fix the measured speed of this machine, so that the scale does not depend on its load.

    The pilots run in real time, on a few digits in place of CIFAR-10, and so find that training is faster than that. A
    ResNet is too slow for any budget nevertheless: its pilot would take minutes.
    """
    speeds = {"resnet18": 0.01, "convnet": 10_000.0}
    monkeypatch.setattr(budget.calibration, "training_speed", lambda spec, device: speeds[spec.model.encoder.name])
    monkeypatch.setattr(budget.calibration, "judging_seconds", lambda spec, labelled, device: 0.5)


def test_the_list_shows_every_table_and_the_cost_of_its_rows() -> None:
    document = json.loads(fedssl("reproduce", "--list", "--format", "json").stdout)
    shown = fedssl("reproduce", "--list").stdout
    cells = fedssl("reproduce", "fedx-1:simclr", "--list").stdout

    assert sum("-fig" not in cell["table"] for cell in document) == 395
    assert document[0]["published"] == {"last": 51.31, "best": 52.88}
    assert document[0]["flops"] == pytest.approx(3.3e17, rel=0.02)
    assert "fedrlc-4" in shown
    assert "measured with a ResNet-18" in shown
    assert cells.count("fedx-1") == 3


def test_the_shown_spec_is_the_one_that_would_run() -> None:
    result = fedssl("reproduce", "fedx-3a:FedSimCLR@10%", "--spec", "--set", "seed=5")

    spec = RunSpec.model_validate(yaml.safe_load(result.stdout))
    assert spec.partition is not None
    assert (spec.partition.share, spec.num_rounds, spec.seed) == (0.1, 100, 5)


SMALLER = [
    "--set", "model.encoder.widths=[8,16]", "--set", "model.projector.out_dim=16", "--set", "num_rounds=2",
    "--set", "training.local_epochs=1", "--set", "partition.num_clients=3", "--set", "evaluation.max_train=200",
]  # fmt: skip


@pytest.mark.full
def test_a_budget_scales_a_row_down_and_lists_the_differences(root: Path, tmp_path: Path, fast: None) -> None:
    asked = ("reproduce", "fedx-1:SimCLR+FedX@cifar10", "--budget", "5m", "--data-folder", root, "--out", tmp_path)
    result = fedssl(*asked, *SMALLER)

    assert result.exit_code == 0, result.output
    for text in ("56.88", "57.95", "num_rounds: 100 -> 2", "model.encoder.name: resnet18 -> convnet", "note: "):
        assert text in result.stdout
    assert "scaled down to about" in result.stderr
    again = fedssl(*asked, *SMALLER, "--format", "json")
    document = json.loads(again.stdout)
    assert len(document) == 1
    assert "measuring" not in again.stderr, "the plan was kept"
    assert "round 1" not in again.stderr, "the run was kept"
    report = fedssl("reproduce", "--report", "--out", tmp_path)
    assert "| FedSimCLR+FedX | cifar10 | last | 56.88 |" in report.stdout
    assert json.loads(fedssl("reproduce", "--report", "--out", tmp_path, "--format", "json").stdout) == document


def test_a_plan_is_not_reused_for_other_settings(root: Path, tmp_path: Path, fast: None) -> None:
    asked = ("reproduce", "fedx-1:SimCLR@cifar10", "--budget", "5m", "--data-folder", root, "--out", tmp_path)
    asked += ("--dry-run", *SMALLER, "--set", "partition.max_images=200", "--set", 'evaluation.measures=["knn"]')
    asked += ("--set", "model.encoder.name=convnet")  # so few images of a ResNet would fit into the budget too
    said = [fedssl(*asked, "--set", f"seed={seed}").stderr for seed in (1, 1, 2)]
    assert ["measuring the first rounds" in text for text in said] == [True, False, True]


def test_a_plan_is_made_again_for_other_processes_or_threads(
    root: Path, tmp_path: Path, fast: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, inside = list[tuple[int, str]](), list[str]()
    asked = ("reproduce", "fedx-1:SimCLR@cifar10", "--budget", "5m", "--data-folder", root, "--out", tmp_path)

    def calibrated_fit(cells: object, seconds: object, seeds: object, speeds: budget.Speeds, *_: object) -> budget.Fit:
        made.append((speeds.num_processes, speeds.device))
        if len(made) == 1:
            inside.append(fedssl(*asked, "--dry-run").stderr)  # the same command at the same time
        return budget.Fit(Scale(images=0.1), (0,), 10.0)

    monkeypatch.setattr(steps, "calibrated_fit", calibrated_fit)
    monkeypatch.setattr(steps, "num_usable_cores", lambda: 4)
    for options in ((), (), ("--jobs", "2"), ("--jobs", "2"), ("--jobs", "2", "--threads", "2"), ("--threads", "2")):
        assert fedssl(*asked, "--dry-run", *options).exit_code == 0
    assert [processes for processes, _ in made] == [1, 2, 2, 1]
    assert "is in use by process" in inside[0]


def test_results_of_other_seeds_are_not_replaced(root: Path, tmp_path: Path, fast: None) -> None:
    asked = ("reproduce", "fedx-1:SimCLR@cifar10", "--data-folder", root, "--out", tmp_path, "--format", "json")
    asked += (
        *SMALLER,
        "--set",
        "num_rounds=1",
        "--set",
        "partition.max_images=200",
        "--set",
        "model.encoder.name=convnet",
    )
    asked += ("--set", "evaluation.settings=fast", "--set", "evaluation.max_test=100", "--yes")
    result = fedssl(*asked, "--seeds", "0,1")
    assert result.exit_code == 0, result.output
    [first] = json.loads(result.stdout)
    refused = fedssl(*asked, "--seeds", "2")

    assert refused.exit_code == 5
    assert "has the results of seeds 0,1, which would be lost: give --seeds 0,1,2" in refused.stderr
    assert "round 1" not in refused.stderr, "nothing was run"
    assert json.loads(fedssl("reproduce", "--report", "--out", tmp_path, "--format", "json").stdout) == [first]
    [both] = json.loads(fedssl(*asked, "--seeds", "0,1,2").stdout)
    assert both["seeds"] == [0, 1, 2]
    assert {name: values[:2] for name, values in both["measured"].items()} == first["measured"]


def test_a_run_longer_than_an_hour_needs_yes(root: Path, tmp_path: Path, fast: None) -> None:
    result = fedssl("reproduce", "fedx-1:SimCLR@cifar10", "--data-folder", root, "--out", tmp_path)

    assert result.exit_code == 2
    assert "this will take about" in result.stderr
    assert "--budget 5m scales it down, --yes starts it" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--budget", "5m"], "give a table"),
        (["fedx-9"], "there is no table called 'fedx-9'"),
        (["fedx-1:SimCLR@cifar10", "--budget", "soon"], "give a duration such as 90s, 5m or 2h"),
        (["fedx-1:SimCLR@cifar10", "--seeds", ""], "give whole numbers"),
        ([""], "there is no table"),
        (["fedx-1:SimCLR@cifar10", "--seeds", "0,1,0"], "the seed 0 is listed twice"),
        (["fedx-1:SimCLR@svhn", "--budget", "5m"], "missing data: SVHN"),
        (["fedx-1:SimCLR@cifar10", "--set", "training.batch=1"], "there is no such key; did you mean batch_size"),
    ],
)
def test_wrong_usage_is_one_error(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], said: str
) -> None:
    monkeypatch.delenv("FEDSSL_DATA", raising=False)
    result = fedssl("reproduce", *arguments, "--data-folder", root, "--out", tmp_path)

    assert result.exit_code == 2, result.output
    assert said in result.stderr
    assert "Traceback" not in result.output


def test_durations_are_parsed() -> None:
    assert [seconds_of(text) for text in ("90s", "5m", "1.5h", "30")] == [90.0, 300.0, 5400.0, 30.0]


def result_of(task: Task, seeds: Sequence[int]) -> CellResult:
    cell = task.cell
    measured = dict.fromkeys(cell.published, (50.0,) * len(seeds))
    place = (cell.table, cell.row, cell.column)
    return CellResult(*place, cell.published, measured, tuple(seeds), task.differences, cell.notes, "1 CPU", 1.0)


def test_a_dry_run_starts_nothing_and_shows_what_would_be_run(root: Path, tmp_path: Path, fast: None) -> None:
    """It needs no --yes, and a document goes to standard output."""
    asked = ("reproduce", "fedx-1:SimCLR@cifar10", "--data-folder", root, "--out", tmp_path, "--dry-run")
    document = json.loads(fedssl(*asked, "--format", "json", "--seeds", "0,1").stdout)
    shown = fedssl(*asked)

    cells = document.pop("cells")
    assert document == {"dry_run": True, "seeds": [0, 1], "seconds": 2 * 100 * 10 * 50_000 / 0.01}
    assert [(each["table"], each["row"], each["column"]) for each in cells] == [("fedx-1", "FedSimCLR", "cifar10")]
    assert cells[0]["published"] == {"last": 51.31, "best": 52.88}
    assert [each["key"] for each in cells[0]["differences"]] == ["evaluation.dataset", "partition.dataset"]
    assert "resnet18, 100 rounds of 10 epochs, all images" in shown.stdout
    assert "dry run: nothing was started; seeds 0" in shown.stderr
    assert not list(tmp_path.iterdir())


def test_the_announced_time_counts_processes_and_only_runs_that_are_not_finished(
    root: Path, tmp_path: Path, fast: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(steps, "num_usable_cores", lambda: 4)
    asked = ("reproduce", "fedx-1:SimCLR@cifar10", "--data-folder", root, "--out", tmp_path, "--seeds", "0,1,2")

    def announced(*options: str) -> tuple[float, str]:
        result = fedssl(*asked, *options, "--dry-run", "--format", "json")
        return json.loads(result.stdout)["seconds"], result.stderr

    whole, _ = announced()
    assert announced("--jobs", "2")[0] == whole / 2
    assert (
        "with up to 2 clients at a time, plus the time for evaluation" in announced("--jobs", "8", "--threads", "2")[1]
    )
    monkeypatch.setattr(steps, "unfinished_seeds", lambda task, seeds, folder, machine: [2])
    assert announced()[0] == whole / 3
    assert announced("--restart")[0] == whole
    monkeypatch.setattr(steps, "unfinished_seeds", lambda task, seeds, folder, machine: [])
    assert announced()[0] == 0
    monkeypatch.setattr(steps, "run_task", lambda task, seeds, *_, **__: result_of(task, seeds))
    read = fedssl(*asked, "--format", "json")
    assert read.exit_code == 0, "finished runs are read without --yes"
    assert "all runs are finished: only measures that are missing will be computed" in read.stderr


def test_a_cell_that_fails_does_not_end_the_others(
    root: Path, tmp_path: Path, fast: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_task(task: Task, seeds: Sequence[int], *_: object, **__: object) -> CellResult:
        if task.cell.row == "FedBYOL":
            raise MethodError("the loss is not finite\nin client-1")
        return result_of(task, seeds)

    monkeypatch.setattr(steps, "run_task", run_task)
    options = ("--data-folder", root, "--out", tmp_path, "--yes", "--format", "json")
    several = fedssl("reproduce", "fedx-1@cifar10", *options)
    alone = fedssl("reproduce", "fedx-1:BYOL@cifar10", *options)

    rows = [each["row"] for each in json.loads(several.stdout)]
    assert several.exit_code == 1
    assert len(rows) == len(select("fedx-1@cifar10")) - 1
    assert "FedBYOL" not in rows
    assert "fedx-1:FedBYOL@cifar10 failed: the loss is not finite\n" in several.stderr
    assert alone.exit_code != 0
    assert alone.stdout == ""
    assert "in client-1" in alone.stderr


def test_an_interrupt_shows_how_to_continue(
    root: Path, tmp_path: Path, fast: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object, **__: object) -> CellResult:
        raise KeyboardInterrupt

    monkeypatch.setattr(steps, "run_task", interrupted)
    result = fedssl("reproduce", "fedx-1:SimCLR@cifar10", "--data-folder", root, "--out", tmp_path, "--yes")

    assert result.exit_code == 130
    assert "interrupted: run the same command again to keep what is finished" in result.stderr
