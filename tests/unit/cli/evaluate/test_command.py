"""The command `fedssl evaluate`, run in this process on small models."""

import json
import math
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from PIL import Image

from fedssl.artifacts.store import digest_of
from fedssl.artifacts.tensors import load_tensors, save_tensors
from fedssl.cli.evaluate.command import TuningName
from fedssl.cli.specs import read_spec
from fedssl.data import ImageData, load_dataset, save_npz
from fedssl.evaluation import FINE_TUNINGS, PROBES, labelled_share
from fedssl.evaluation.suite import evaluate_encoder, load_encoder, load_labelled
from fedssl.models import build_encoder, initialised
from fedssl.protocol.evaluation import EvaluationConfig, Settings
from fedssl.protocol.model import EncoderConfig
from fedssl.protocol.runs import RunSpec
from fedssl.run_files import ENCODER, INITIAL, LINEAGE, MODEL, SPEC, write_spec
from fedssl.simulation import simulate
from support.commands import fedssl

SPEC_TEXT = """
num_rounds = 1
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


def document(*arguments: object) -> dict[str, Any]:
    result = fedssl("evaluate", *arguments, "--format", "json")
    assert result.exit_code == 0, result.stderr
    found: dict[str, Any] = json.loads(result.stdout)
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder as `fedssl simulate` writes it."""
    place = tmp_path_factory.mktemp("run")
    (place / "spec.toml").write_text(SPEC_TEXT)
    result = simulate(read_spec(str(place / "spec.toml")))
    write_spec(result.spec, place / SPEC)
    save_tensors(result.model, place / MODEL)
    save_tensors(result.initial, place / INITIAL)
    own = {name: tensor for name, tensor in result.model.items() if name.startswith("encoder.")}
    save_tensors(own, place / ENCODER)
    return place


def test_the_choices_are_those_of_the_library() -> None:
    assert set(get_args(Settings)) <= PROBES.keys()
    assert set(get_args(TuningName)) == FINE_TUNINGS.keys()


def test_the_scores_equal_those_of_evaluate_encoder(folder: Path) -> None:
    found = document(folder / ENCODER)
    spec: RunSpec = read_spec(str(folder / SPEC))
    labelled = load_labelled("digits", spec.data, max_train=10_000, max_test=None, seed=0)
    encoder = load_encoder(load_tensors(folder / MODEL), spec)
    expected = evaluate_encoder(encoder, labelled, EvaluationConfig(dataset="digits"), spec.data)
    assert found["linear_probe"] == expected.pop("probe")
    assert {name: found[name] for name in expected} == expected
    assert (found["data"], found["settings"], found["num_labels"], found["num_test"]) == ("digits", "fast", 1437, 360)


def test_knn_uses_no_more_neighbours_than_there_are_labels(folder: Path) -> None:
    result = fedssl("evaluate", folder, "--measures", "knn", "--num-labels", 30, "--num-test", 20)
    assert " 30 neighbours" in result.stdout


def test_one_test_image_has_no_uniformity(folder: Path, tmp_path: Path) -> None:
    train, test = (load_dataset("digits", split) for split in ("train", "test"))
    save_npz(tmp_path / "one.npz", train.subset(np.arange(100)), test.subset(np.arange(1)))
    found = document(folder, "--data", tmp_path / "one.npz")
    assert found["num_test"] == 1
    assert found["knn"] in (0.0, 1.0)
    assert found["uniformity"] is None, "which is of pairs"


def test_a_run_folder_can_be_given_instead_of_its_model(folder: Path) -> None:
    arguments = ("--measures", "none", "--num-test", 20, "--angles")
    found = document(folder, *arguments, folder)
    assert found["angles"] == document(folder / MODEL, *arguments, folder / MODEL)["angles"]


def test_the_initial_model_of_another_run_is_not_used_as_a_baseline(folder: Path, tmp_path: Path) -> None:
    """It remains in the folder if a second run is pulled into the same folder."""
    for name in (MODEL, SPEC):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    other = initialised(lambda: build_encoder(EncoderConfig(widths=(4, 8)), 1, 16), 7)
    save_tensors({f"encoder.{name}": tensor for name, tensor in other.state_dict().items()}, tmp_path / INITIAL)
    lineage = {"model": digest_of(folder / MODEL), "initial_model": digest_of(folder / INITIAL)}
    (tmp_path / LINEAGE).write_text(json.dumps(lineage))
    arguments = ("--measures", "knn", "--num-labels", 100, "--num-test", 50)
    assert document(tmp_path / MODEL, *arguments)["baselines"] == document(folder / MODEL, *arguments)["baselines"]


def test_a_papers_settings_report_last_and_best_and_how_the_best_was_chosen(folder: Path) -> None:
    arguments = (folder / MODEL, "--settings", "fedrlc", "--num-labels", 100, "--num-test", 50, "--measures", "probe")
    found = document(*arguments)
    full = found["linear_probe_in_full"]
    assert full["num_epochs"] == 200
    assert full["accuracy"] == found["linear_probe"] <= full["best_accuracy"]
    assert (found["num_labels"], found["num_test"]) == (100, 50)
    assert "knn" not in found
    table = fedssl("evaluate", *arguments).stdout
    if full["best_epoch"] < 200:
        assert full["chosen"] == f"last: epoch 200; best: epoch {full['best_epoch']}, chosen on the test set"
        assert "chosen on the test set" in table


def test_fine_tuning_uses_shares_of_all_labels(folder: Path) -> None:
    found = document(folder / MODEL, "--measures", "none", "--num-labels", 50, "--semi", "5,10")
    labels = load_dataset("digits", "train").labels
    assert labels is not None
    assert [entry["share"] for entry in found["semi"]] == [0.05, 0.1]
    assert [entry["num_labelled"] for entry in found["semi"]] == [
        len(labelled_share(labels, share, 0)) for share in (0.05, 0.1)
    ]
    assert all(0 < entry["accuracy"] <= entry["best_accuracy"] <= 1 for entry in found["semi"])
    assert "linear_probe" not in found


def test_transfer_to_images_of_another_shape_is_scored(folder: Path, tmp_path: Path) -> None:
    sides = []
    for split in ("train", "test"):
        digits = load_dataset("digits", "train" if split == "train" else "test").subset(np.arange(150))
        coloured = np.ascontiguousarray(np.repeat(np.repeat(np.repeat(digits.images, 3, 1), 2, 2), 2, 3))
        sides.append(ImageData(coloured, digits.labels))
    save_npz(tmp_path / "other.npz", *sides)
    found = document(folder / MODEL, "--measures", "knn", "--transfer", tmp_path / "other.npz")["transfer"]
    assert found["linear_probe"]["accuracy"] > 0.2
    assert found["fine_tuned"]["num_epochs"] == 20
    assert found["fine_tuned"]["num_labelled"] == 150


@pytest.mark.full(but=1)
@pytest.mark.parametrize("method", ["pca", "tsne"])
def test_a_map_is_written_as_a_png(folder: Path, tmp_path: Path, method: str) -> None:
    path = tmp_path / "new folder" / "map.png"
    arguments = ("--measures", "none", "--map", path, "--map-method", method, "--map-images", 40)
    assert document(folder / MODEL, *arguments)["map"] == str(path)
    with Image.open(path) as image:
        assert image.format == "PNG"


def test_angles_between_a_clients_model_and_the_global_model_are_reported(folder: Path) -> None:
    same = document(folder / MODEL, "--measures", "none", "--angles", folder / MODEL)["angles"]
    assert same["local_global"] == pytest.approx(0, abs=1e-3)
    assert same["inter_class_local"] == same["inter_class_global"]
    other = document(folder / MODEL, "--measures", "none", "--angles", folder / INITIAL)["angles"]
    assert 0 < other["local_global"] <= 180
    assert set(other["by_class"]) == {str(digit) for digit in range(10)}
    shown = fedssl("evaluate", folder / MODEL, "--measures", "none", "--angles", folder / INITIAL).stdout
    assert f"{other['local_global']:.2f}°" in shown


@pytest.mark.full
def test_a_torchvision_network_is_evaluated_without_a_spec(tmp_path: Path) -> None:
    """The file has torchvision's names and a classifier, which is left out. Stem and channels come from its tensors."""
    encoder = initialised(lambda: build_encoder(EncoderConfig(name="resnet18"), 1), 0)
    path = tmp_path / "plain.safetensors"
    save_tensors({**encoder.state_dict(), "fc.weight": torch.zeros(10, 512), "fc.bias": torch.zeros(10)}, path)
    few = load_dataset("digits", "train").subset(np.arange(40))
    save_npz(tmp_path / "few.npz", few, few)
    arguments = (path, "--data", tmp_path / "few.npz", "--measures", "knn", "--encoder", "resnet18")
    result = fedssl("evaluate", *arguments, "--format", "json")
    assert result.exit_code == 0, result.stderr
    assert "resnet18 with the cifar stem: images of 32 pixels, not normalised" in result.stderr
    assert json.loads(result.stdout)["knn"] > 0.1


def test_a_diverged_model_is_reported_as_such(folder: Path, tmp_path: Path) -> None:
    tensors = load_tensors(folder / MODEL)
    name = next(name for name in tensors if name.startswith("encoder.") and name.endswith("weight"))
    save_tensors({**tensors, name: torch.full_like(tensors[name], math.nan)}, tmp_path / MODEL)
    for extra in ((), ("--measures", "none", "--map", tmp_path / "map.png")):
        result = fedssl("evaluate", tmp_path / MODEL, "--spec", folder / SPEC, *extra)
        assert result.exit_code == 1
        assert "its training diverged" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--measures", "probe,wrong"], "there is no 'wrong'; give any of probe, knn, geometry, or none"),
        (["--semi", "0"], "give percentages above 0 and up to 100"),
        (["--semi", "one"], "give percentages above 0 and up to 100"),
        (["--semi", "1", "--settings", "flesd"], "flesd has no semi-supervised evaluation"),
        (["--map", "{folder}/encoder.safetensors/map.png"], "/encoder.safetensors is not a folder"),
        (["--semi-settings", "ssd"], "give percentages of labels too"),
        (["--data", "{bare}"], "has no labels"),
        (["--data", "nowhere"], "found no data set at nowhere"),
        (["--angles", "{folder}/encoder.safetensors"], "the model holds no projector"),
        (["--measures", ""], "there is no ''; give any of probe, knn, geometry, or none"),
        (["--device", "cuda:99"], "--device cuda:99 cannot be used here"),
        (["--encoder", "resnet18"], "is not torchvision's resnet18"),
    ],
)
def test_wrong_usage_is_one_line_and_exit_code_2(folder: Path, tmp_path: Path, arguments: list[str], said: str) -> None:
    images = load_dataset("digits", "test").images
    save_npz(tmp_path / "bare.npz", ImageData(images), ImageData(images))
    filled = [text.format(folder=folder, bare=tmp_path / "bare.npz") for text in arguments]
    result = fedssl("evaluate", folder / MODEL, "--num-labels", "50", *filled)
    assert result.exit_code == 2, result.output
    assert said in result.stderr
    assert "Traceback" not in result.output


@pytest.mark.parametrize(
    ("option", "value", "reason"),
    [("--angles", "none.safetensors", "does not exist"), ("--map", ".", "is a directory")],
)
def test_a_path_that_cannot_be_used_is_refused_before_anything_is_computed(
    folder: Path, option: str, value: str, reason: str
) -> None:
    result = fedssl("evaluate", folder / MODEL, option, folder / value)
    assert result.exit_code == 2
    assert result.stderr.startswith(f"error: invalid value for '{option}': ")
    assert f"{reason}. See `" in result.stderr


def test_a_spec_without_data_needs_the_data_option(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "bare.toml").write_text(SPEC_TEXT.partition("[partition]")[0])
    result = fedssl("evaluate", folder / MODEL, "--spec", tmp_path / "bare.toml")
    assert result.exit_code == 2
    assert "the spec names no data set: give a labelled one with --data" in result.stderr


def test_a_missing_model_is_reported_before_its_missing_spec(tmp_path: Path) -> None:
    result = fedssl("evaluate", tmp_path / "encoder.safetensors", "--data", "digits")
    assert result.exit_code == 2
    assert f"there is no file {tmp_path / 'encoder.safetensors'}" in result.stderr.replace("\n", "")


def test_the_untrained_encoder_and_chance_are_shown_next_to_the_scores(folder: Path, tmp_path: Path) -> None:
    few = ("--measures", "knn", "--num-labels", "200")
    with_initial = document(folder / MODEL, *few)["baselines"]
    (tmp_path / MODEL).write_bytes((folder / MODEL).read_bytes())
    (tmp_path / SPEC).write_bytes((folder / SPEC).read_bytes())
    alone = document(tmp_path / MODEL, *few)["baselines"]
    before = document(folder / INITIAL, *few)

    assert with_initial["untrained"] == {"knn": before["knn"]}
    assert alone == with_initial, "without the file, the weights are drawn as the run drew them"
    assert alone["chance"] == {
        "accuracy": 37 / 360, "num_classes": 10, "how": "the share of the largest of 10 classes"
    }  # fmt: skip
    assert document(folder / MODEL, *few, "--no-baselines")["baselines"]["untrained"] is None


def test_an_encoder_with_a_start_is_not_compared_with_random_weights(folder: Path, tmp_path: Path) -> None:
    few = ("--measures", "knn", "--num-labels", "200")
    spec = read_spec(str(folder / SPEC), ["model.initial.weights=start"])
    write_spec(spec, tmp_path / SPEC)
    (tmp_path / MODEL).write_bytes((folder / MODEL).read_bytes())
    assert document(tmp_path / MODEL, *few)["baselines"]["untrained"] is None
    result = fedssl("evaluate", tmp_path / MODEL, "--data", "digits", *few)
    assert "started from the weights start, and there is no" in result.stderr.replace("\n", " ")
    (tmp_path / INITIAL).write_bytes((folder / INITIAL).read_bytes())
    assert document(tmp_path / MODEL, *few)["baselines"]["untrained"] is not None
    shown = fedssl("evaluate", tmp_path / MODEL, "--data", "digits", *few).stdout
    assert "start: the encoder before the first round, from the weights start" in shown
