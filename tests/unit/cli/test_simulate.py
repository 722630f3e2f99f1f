"""The commands `fedssl simulate` and `fedssl evaluate`, run in this process."""

import itertools
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
import torch
from PIL import Image

from fedssl.artifacts.tensors import load_tensors
from fedssl.cli.specs import read_spec
from fedssl.data.partitioning import partition_dataset
from fedssl.simulation import simulate
from support.commands import fedssl
from support.forked_clients import forked_processes

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
[watch]
num_images = 0
"""


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("spec") / "tiny.toml"
    path.write_text(SPEC)
    return path


@pytest.fixture(scope="module")
def out(spec: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder with the results of one simulation."""
    folder = tmp_path_factory.mktemp("results") / "out"
    result = fedssl("simulate", spec, "--out", folder, "--keep-clients", "--format", "json")
    assert result.exit_code == 0, result.stderr
    document: dict[str, Any] = json.loads(result.stdout)
    assert document["rounds"] == 2
    assert all(Path(path).exists() for path in document["files"].values())
    assert [line.partition(":")[0] for line in result.stderr.splitlines()] == ["round 1 of 2", "round 2 of 2"]
    return folder


def test_the_command_gives_the_same_bits_as_the_library(spec: Path, out: Path) -> None:
    expected = simulate(read_spec(str(spec)))

    for name, tensors in (("model", expected.model), ("initial", expected.initial)):
        found = load_tensors(out / f"{name}.safetensors")
        assert found.keys() == tensors.keys()
        assert all(torch.equal(found[key], tensors[key]) for key in found)


def test_several_processes_give_the_same_files(spec: Path, out: Path, tmp_path: Path) -> None:
    with forked_processes():
        result = fedssl("simulate", spec, "--out", tmp_path, "--keep-clients", "--jobs", "2")

    assert result.exit_code == 0, result.output
    for name in ("model", "initial", "encoder", "clients/client-0", "clients/client-1"):
        file = f"{name}.safetensors"
        assert (tmp_path / file).read_bytes() == (out / file).read_bytes()
    histories = [json.loads((folder / "history.json").read_text()) for folder in (out, tmp_path)]
    for entry in (entry for history in histories for entry in history):
        del entry["seconds"]
    assert json.dumps(histories[0]) == json.dumps(histories[1])


def test_the_history_lists_each_round_and_client(out: Path) -> None:
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


@pytest.mark.full
def test_a_killed_simulation_resumes_and_reports_it(spec: Path, tmp_path: Path) -> None:
    long = ("simulate", str(spec), "--set", "num_rounds=60", "--set", "training.local_epochs=2")
    folder = tmp_path / "out"
    with subprocess.Popen([sys.executable, "-m", "fedssl.cli.main", *long, "--out", str(folder)], stderr=-3) as process:
        while not (folder / "checkpoint" / "manifest.json").exists():
            assert process.poll() is None, "it ended before its first checkpoint"
            time.sleep(0.02)
        process.kill()

    refused = fedssl(*long, "--out", folder, "--set", "seed=1")
    short = ("--set", "num_rounds=60", "--set", "training.local_epochs=2", "--out", folder)
    manifest = json.loads((folder / "checkpoint" / "manifest.json").read_text())
    resumed = fedssl("simulate", spec, *short, "--format", "json")

    assert refused.exit_code == 5
    assert "checkpoint of another spec: take another folder, or start again with --restart" in refused.stderr
    assert f"resuming after round {len(manifest['history'])}," in resumed.stderr
    assert json.loads(resumed.stdout)["rounds"] == 60


def test_a_finished_simulation_is_kept_unless_restart_is_given(spec: Path, tmp_path: Path) -> None:
    judged = ("--set", 'evaluation={dataset="digits",every=1,max_train=200,measures=["probe"]}', "--out", tmp_path)
    first = fedssl("simulate", spec, *judged, "--format", "json")
    kept = fedssl("simulate", spec, *judged)
    anew = fedssl("simulate", spec, *judged, "--restart", "--format", "json")
    other = fedssl("simulate", spec, "--out", tmp_path)

    assert "after round 0: linear probe" in first.stderr
    assert "holds this run, finished" in kept.stderr
    assert "round 1 of 2" not in kept.stderr
    assert "chosen on the test set" in kept.stdout
    assert "round 1 of 2" in anew.stderr
    document, again = json.loads(first.stdout), json.loads(anew.stdout)
    assert (document["losses"], document["evaluations"]) == (again["losses"], again["evaluations"])
    assert sorted(document["evaluations"]) == ["0", "1", "2"]
    assert document["best"]["probe"]["value"] == max(document["evaluations"][at]["probe"] for at in ("1", "2"))
    assert document["best_chosen_on"] == "test"
    assert other.exit_code == 5


def test_the_written_spec_can_be_simulated_again(out: Path, tmp_path: Path) -> None:
    assert fedssl("simulate", out / "spec.yaml", "--out", tmp_path, "--set", "num_rounds=1").exit_code == 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["simulate", "{spec}", "--set", "partition=null"], "has no [partition]"),
        (["simulate", "{spec}", "--device", "cuda:99"], "--device cuda:99 cannot be used here"),
        (["simulate", "{spec}", "--jobs", "0"], "--jobs 0: give a number of processes, 1 or more, or auto"),
        (["simulate", "{spec}", "--jobs", "many"], "--jobs many: give a number of processes"),
        (
            ["simulate", "{spec}", "--set", "partition.dataset=nowhere", "--out", "{out}/none"],
            "found no data set at nowhere",
        ),
        (["simulate", "{spec}", "--set", "training.batch_size=1"], "training.batch_size: "),
        (["simulate", "missing.toml"], "No such file"),
        (["evaluate", "{out}/none.safetensors", "--data", "digits"], "there is no"),
        (["evaluate", "{out}/history.json", "--data", "digits"], "does not hold an encoder"),
        (["evaluate", "{spec}", "--data", "digits"], "give the run's spec with --spec"),
        (["evaluate", "{out}/model.safetensors", "--data", "digits", "--spec", "{wide}"], "does not hold the encoder"),
    ],
)
def test_wrong_usage_is_one_line_and_exit_code_2(
    spec: Path, out: Path, tmp_path: Path, arguments: list[str], said: str
) -> None:
    wide = tmp_path / "wide.toml"
    wide.write_text(SPEC.replace("[4, 8]", "[4, 16]"))

    result = fedssl(*(text.format(spec=spec, out=out, wide=wide) for text in arguments))

    assert result.exit_code == 2, result.output
    assert said in result.stderr
    assert "Traceback" not in result.output


JUDGED = ("--set", "evaluation.dataset=digits", "--set", 'evaluation.measures=["knn"]', "--set", "evaluation.every=1")


def test_each_score_is_shown_next_to_its_baselines(spec: Path, tmp_path: Path) -> None:
    result = fedssl("simulate", spec, "--out", tmp_path / "out", *JUDGED)
    again = json.loads(fedssl("simulate", spec, "--out", tmp_path / "out", *JUDGED, "--format", "json").stdout)

    assert result.exit_code == 0, result.output
    untrained, last = again["evaluations"]["0"]["knn"], again["evaluations"]["2"]["knn"]
    row = next(line for line in result.stdout.splitlines() if line.startswith(" kNN"))
    assert row.split()[1:7] == ["10.28", "%", f"{100 * untrained:.2f}", "%", f"{100 * last:.2f}", "%"]
    assert "the share of the largest of 10 classes" in result.stdout
    assert again["baselines"]["untrained"] == {"knn": untrained}
    assert again["baselines"]["chance"]["accuracy"] == 37 / 360


def test_a_result_of_an_earlier_version_has_no_chance_level(spec: Path, tmp_path: Path) -> None:
    fedssl("simulate", spec, "--out", tmp_path / "out", *JUDGED)
    path = tmp_path / "out" / "result.json"
    document = json.loads(path.read_text())
    del document["chance"]
    path.write_text(json.dumps(document))

    result = fedssl("simulate", spec, "--out", tmp_path / "out", *JUDGED)

    assert result.exit_code == 0, result.output
    assert next(line for line in result.stdout.splitlines() if line.startswith(" kNN")).split()[1] == "-"


def test_the_reason_for_a_pause_is_printed_once(spec: Path, tmp_path: Path) -> None:
    alarm = (
        "--set",
        "watch.num_images=64",
        "--set",
        "watch.min_embedding_std=1",
        "--set",
        "watch.first_round=1",
        "--set",
        "watch.action=pause",
    )
    result = fedssl("simulate", spec, "--out", tmp_path / "out", *alarm)

    assert result.exit_code == 1, result.output
    assert result.stderr.count("is below") == 1
    assert "error: paused after round 1" in result.stderr


@pytest.mark.parametrize(("suffix", "channels"), [(".tif", 1), (".png", 1), (".tif", 5)])
def test_images_of_16_bits_are_trained_on_through_a_window(tmp_path: Path, suffix: str, channels: int) -> None:
    rng = np.random.default_rng(0)
    for split, number in itertools.product(("train", "test"), range(8)):
        path = tmp_path / "images" / split / "ab"[number % 2] / f"{number}{suffix}"
        path.parent.mkdir(parents=True, exist_ok=True)
        values = rng.integers(0, 4096, (9, 12, channels)).astype(np.uint16)
        if suffix == ".png":
            Image.fromarray(values[:, :, 0]).save(path)
        else:
            tifffile.imwrite(path, np.moveaxis(values, -1, 0), photometric="minisblack")
    text = SPEC.replace('"digits"', f'"{tmp_path / "images"}"').replace("channels = 1", f"channels = {channels}")
    text = text.replace("image_size = 16", "image_size = 8").replace("max_images = 200", "")
    (tmp_path / "spec.toml").write_text(text)
    refused = fedssl("simulate", tmp_path / "spec.toml", "--out", tmp_path / "out")
    assert refused.exit_code == 2, refused.output
    assert "choose which values become black and white with [data.window] in the spec" in refused.stderr.lower()
    (tmp_path / "spec.toml").write_text(f"{text}\n[data.window]\nvalues = [0, 4095]\n")
    result = fedssl("simulate", tmp_path / "spec.toml", "--out", tmp_path / "out")
    assert result.exit_code == 0, result.output
    written = read_spec(tmp_path / "out" / "spec.yaml")
    assert written.data.window is not None
    assert written.data.window.values == (0, 4095)
    assert written.partition is not None
    simulated = simulate(written, partition_dataset(written.partition, written.data).by_client)
    found = load_tensors(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(found[name], tensor) for name, tensor in simulated.model.items())


def test_a_restart_deletes_the_encoders_of_an_earlier_method(spec: Path, tmp_path: Path) -> None:
    """A method that sends nothing leaves one encoder per client."""
    few = ("simulate", spec, "--out", tmp_path / "out", "--set", "num_rounds=1")
    assert fedssl(*few, "--set", "method.name=single").exit_code == 0
    assert (tmp_path / "out/encoder-client-0.safetensors").exists()
    assert fedssl(*few, "--restart").exit_code == 0
    assert [path.name for path in (tmp_path / "out").glob("encoder*")] == ["encoder.safetensors"]
