"""`fedssl simulate` and `fedssl evaluate`, in this process."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

from fedssl.artifacts.tensors import load_tensors
from fedssl.cli.main import app
from fedssl.cli.specs import read_spec
from fedssl.simulation import simulate

SPEC = """
name = "tiny"
num_rounds = 2
[model.encoder]
widths = [4, 8]
[model.projector]
hidden_dims = [8]
out_dim = 4
[data]
channels = 1
image_size = 16
[training]
batch_size = 64
[partition]
dataset = "digits"
num_clients = 2
scheme = "iid"
max_images = 200
"""


def fedssl(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("spec") / "tiny.toml"
    path.write_text(SPEC)
    return path


@pytest.fixture(scope="module")
def out(spec: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The results of one simulation."""
    folder = tmp_path_factory.mktemp("results") / "out"
    result = fedssl("simulate", spec, "--out", folder, "--format", "json")
    assert result.exit_code == 0, result.stderr
    document: dict[str, Any] = json.loads(result.stdout)
    assert document["rounds"] == 2
    assert all(Path(path).exists() for path in document["files"].values())
    assert [line.partition(":")[0] for line in result.stderr.splitlines()] == ["round 1 of 2", "round 2 of 2"]
    return folder


def test_it_gives_the_library_s_bits(spec: Path, out: Path) -> None:
    expected = simulate(read_spec(str(spec)))

    for name, tensors in (("model", expected.model), ("initial", expected.initial)):
        found = load_tensors(out / f"{name}.safetensors")
        assert found.keys() == tensors.keys()
        assert all(torch.equal(found[key], tensors[key]) for key in found)


def test_the_history_tells_each_round_and_client(out: Path) -> None:
    history = json.loads((out / "history.json").read_text())

    assert [entry["round"] for entry in history] == [1, 2]
    assert set(history[0]["clients"]) == set(history[0]["num_examples"]) == {"client-0", "client-1"}
    assert history[1]["loss"] < 0


def test_the_results_can_be_evaluated(out: Path) -> None:
    documents = []
    for model in ("model", "encoder"):
        result = fedssl("evaluate", out / f"{model}.safetensors", "--data", "digits", "--format", "json")
        assert result.exit_code == 0, result.stderr
        documents.append(json.loads(result.stdout))

    assert documents[0]["linear_probe"] == documents[1]["linear_probe"] > 0.3
    assert documents[0]["num_test"] == 360
    assert "linear probe" in fedssl("evaluate", out / "model.safetensors", "--data", "digits").stdout


def test_the_written_spec_simulates_again(out: Path, tmp_path: Path) -> None:
    assert fedssl("simulate", out / "spec.yaml", "--out", tmp_path, "--set", "num_rounds=1").exit_code == 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["simulate", "{spec}", "--set", "partition=null"], "has no [partition]"),
        (["simulate", "{spec}", "--device", "cuda:99"], "--device cuda:99 cannot be used here"),
        (["simulate", "{spec}", "--set", "partition.dataset=nowhere"], "found no data set at nowhere"),
        (["simulate", "{spec}", "--set", "training.batch_size=1"], "training.batch_size: "),
        (["simulate", "missing.toml"], "No such file"),
        (["evaluate", "{out}/none.safetensors", "--data", "digits"], "there is no"),
        (["evaluate", "{out}/history.json", "--data", "digits"], "does not hold the encoder"),
        (["evaluate", "{spec}", "--data", "digits"], "give the run's spec with --spec"),
        (["evaluate", "{out}/model.safetensors", "--data", "digits", "--spec", "{wide}"], "does not hold the encoder"),
    ],
)
def test_wrong_usage_is_one_line_and_2(spec: Path, out: Path, tmp_path: Path, arguments: list[str], said: str) -> None:
    wide = tmp_path / "wide.toml"
    wide.write_text(SPEC.replace("[4, 8]", "[4, 16]"))

    result = fedssl(*(text.format(spec=spec, out=out, wide=wide) for text in arguments))

    assert result.exit_code == 2, result.output
    assert said in result.stderr
    assert "Traceback" not in result.output
