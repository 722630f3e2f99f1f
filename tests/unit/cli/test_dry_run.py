"""The option `--dry-run` describes what would happen, with the numbers known in advance, and starts nothing."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from fedssl.cli.main import app
from fedssl.cli.specs import read_spec
from fedssl.experiments import budget
from fedssl.simulation import simulate

SPEC = """
name = "tiny"
num_rounds = 3
[method]
name = "fedsimclr"
[model.encoder]
widths = [4, 8]
[model.projector]
hidden_dims = [8]
out_dim = 8
[data]
channels = 1
image_size = 16
[training]
batch_size = 32
[partition]
dataset = "digits"
num_clients = 3
scheme = "iid"
max_images = 150
[cohort]
fraction = 0.67
"""

NAMES = ("client-0", "client-1", "client-2")


@pytest.fixture
def spec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.toml").write_text(SPEC)
    return tmp_path / "tiny.toml"


def fedssl(*arguments: object) -> Result:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == 0, result.output
    return result


def test_a_simulation_is_described_with_its_true_numbers(spec: Path) -> None:
    found = json.loads(fedssl("simulate", spec, "--dry-run", "--format", "json").stdout)
    shown = fedssl("simulate", spec, "--dry-run")

    assert [path.name for path in spec.parent.iterdir()] == ["tiny.toml"], "nothing was written"
    result = simulate(read_spec(str(spec)))
    assert (found["rounds"], found["clients_per_round"]) == (3, 2)
    assert found["clients"] == ["client-0", "client-1", "client-2"]
    assert sum(found["images"].values()) == 150
    assert [found[f"bytes_{way}_per_client_and_round"] * 2 for way in ("down", "up")] == [
        result.history[0].bytes_down, result.history[0].bytes_up,
    ]  # fmt: skip
    assert found["bytes_in_total"] == sum(each.bytes_down + each.bytes_up for each in result.history)
    assert "3 would take part, 2 in each round" in shown.stdout
    assert "dry run: nothing was started" in shown.stderr


@pytest.mark.parametrize("dry_run", [["--dry-run"], []])
@pytest.mark.parametrize(
    ("method", "setting"),
    [
        ("fedsimclr", "robustness.max_center_norm=5"),
        ("ridge-probe", "aggregation.encoder_average.decay=0.9"),
        ("ridge-probe", 'upload.dtype="bfloat16"'),
    ],
)
def test_a_run_that_could_only_fail_is_wrong_usage(spec: Path, method: str, setting: str, dry_run: list[str]) -> None:
    classes = ", classes=['0','1','2','3','4','5','6','7','8','9']" if method == "ridge-probe" else ""
    named = ("--set", f'method={{name="{method}"{classes}}}', "--set", setting)
    result = CliRunner().invoke(app, ["simulate", str(spec), *named, *dry_run])
    assert (result.exit_code, "leave" in result.output) == (2, True), result.output


COMPARE = ["compare", "--methods", "fedsimclr"]
RIDGE = 'method={name="ridge-probe", classes=["0","1","2","3","4","5","6","7","8","9"]}'


@pytest.mark.parametrize(
    ("command", "options", "reason"),
    [
        (["simulate"], ["--jobs", "many"], "--jobs many: give a number of processes"),
        (["simulate"], ["--device", "cuda:99"], "--device cuda:99 cannot be used here"),
        (["simulate"], ["--out", "tiny.toml"], "tiny.toml is not a folder"),
        (["simulate"], ["--keep-clients", "--set", RIDGE], "clients' models cannot be kept"),
        (COMPARE, ["--device", "cuda:99"], "--device cuda:99 cannot be used here"),
        (COMPARE, ["--out", "tiny.toml/results"], "tiny.toml is not a folder"),
    ],
)
def test_a_dry_run_refuses_what_the_command_would_refuse(
    spec: Path, command: list[str], options: list[str], reason: str
) -> None:
    for dry_run in ([], ["--dry-run"]):
        result = CliRunner().invoke(app, [*command, str(spec), *options, *dry_run])
        assert (result.exit_code, reason in result.stderr) == (2, True), result.output


def test_a_dry_run_of_a_simulation_reports_a_folder_that_holds_another_run(spec: Path) -> None:
    other = spec.parent / "run" / "checkpoint"
    other.mkdir(parents=True)
    (other / "manifest.json").write_text('{"key": "another"}')
    arguments = ["simulate", str(spec), "--out", "run", "--dry-run"]
    result = CliRunner().invoke(app, arguments)
    assert (result.exit_code, "run holds another spec's run" in result.stderr) == (5, True), result.output
    assert CliRunner().invoke(app, [*arguments, "--restart"]).exit_code == 0


@pytest.mark.parametrize("command", [["simulate"], COMPARE])
def test_missing_evaluation_images_are_reported_by_a_dry_run(spec: Path, command: list[str]) -> None:
    arguments = [*command, str(spec), "--dry-run", "--set", 'evaluation.dataset="nowhere"']
    result = CliRunner().invoke(app, arguments)
    assert (result.exit_code, "encoders are evaluated on labelled images" in result.stderr) == (2, True), result.output


def test_frozen_tensors_are_shown_and_counted_once_per_client(spec: Path) -> None:
    """The first block has 9 * 4 weights, and its BatchNorm has 4 * 4 numbers and a counter."""
    whole = json.loads(fedssl("simulate", spec, "--dry-run", "--format", "json").stdout)
    frozen = ("simulate", spec, "--dry-run", "--set", 'model.trainable=["blocks.1.*"]')
    found = json.loads(fedssl(*frozen, "--format", "json").stdout)
    assert "trainable" not in whole
    assert (found["trainable"], found["frozen_bytes"]) == (["blocks.1.*"], 4 * (9 * 4 + 4 * 4) + 8)
    up, down = (f"bytes_{way}_per_client_and_round" for way in ("up", "down"))
    for way in (up, down):
        assert whole[way] - found[way] > found["frozen_bytes"]  # plus their names in the file header
    assert found["bytes_in_total"] > 3 * 2 * (found[up] + found[down]) + 3 * found["frozen_bytes"]
    shown = " ".join(fedssl(*frozen).stdout.split())
    assert "of the encoder blocks.1.*; the frozen rest, 216 bytes, is received once and never sent" in shown


def test_a_pattern_that_matches_nothing_is_refused(spec: Path) -> None:
    arguments = ["simulate", str(spec), "--dry-run", "--set", 'model.trainable=["blocks.2.*"]']
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    assert "matches no parameter of the encoder: near ones are blocks.1.*" in " ".join(result.stderr.split())


def test_a_comparison_lists_its_runs_and_the_impossible_ones(spec: Path) -> None:
    arguments = ("compare", spec, "--methods", "fedsimclr,flesd", "--baselines", "--dry-run")
    found = json.loads(fedssl(*arguments, "--format", "json").stdout)["runs"]

    assert [row["variant"] for row in found] == ["fedsimclr", "flesd", "local-only", "centralised"]
    assert [row["clients"] for row in found] == [3, None, 3, 1]
    assert "public images" in found[1]["problem"]
    assert found[2]["bytes_up_per_client_and_round"] < 100 < found[0]["bytes_up_per_client_and_round"]
    assert found[3]["bytes_up_per_client_and_round"] is None, "all images are in one place"
    assert "flesd" in fedssl(*arguments).stdout
    assert [path.name for path in spec.parent.iterdir()] == ["tiny.toml"]


@pytest.fixture
def without_fashion_mnist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide the machine's copy of Fashion-MNIST, and let a download fail the test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("FEDSSL_DATA", raising=False)
    monkeypatch.setattr("fedssl.data.datasets._SYSTEM_FOLDER", tmp_path / "system")
    monkeypatch.setattr("fedssl.data.fetch.fetch_fashion_mnist", lambda *_: pytest.fail("it was downloaded"))
    monkeypatch.setattr(budget.calibration, "training_speed", lambda spec, device: 10_000.0)
    monkeypatch.setattr(budget.calibration, "judging_seconds", lambda spec, labelled, device: 0.5)


@pytest.mark.usefixtures("without_fashion_mnist")
@pytest.mark.parametrize(
    ("command", "key", "expected"),
    [
        ("simulate SPEC --set partition.max_images=300", "images", dict.fromkeys(NAMES, 100)),
        ("simulate SPEC --set partition.scheme=dirichlet", "images", dict.fromkeys(NAMES)),
        ("compare SPEC", "dry_run", True),
        ("reproduce fedx-1:SimCLR@fashion-mnist --out OUT", "seconds", 100 * 10 * 60_000 / 10_000),
        ("reproduce fedx-1:SimCLR@fashion-mnist --out OUT --budget 5m", "dry_run", True),
    ],
)
def test_a_missing_data_set_is_reported_and_not_downloaded(
    spec: Path, tmp_path: Path, command: str, key: str, expected: object
) -> None:
    command = command.replace("SPEC", f"{spec} --set partition.dataset=fashion-mnist")
    words = command.replace("OUT", str(tmp_path / "out"))
    result = fedssl(*words.split(), "--dry-run", "--format", "json")

    assert f"Fashion-MNIST would be downloaded into {tmp_path / 'cache'}" in result.stderr
    assert json.loads(result.stdout)[key] == expected
    assert [path.name for path in tmp_path.iterdir()] == ["tiny.toml"], "nothing was written"
