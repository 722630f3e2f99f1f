"""The command `fedssl weights check`, and simulations that start from a weight file."""

import json
from pathlib import Path

import pytest
import torch

from fedssl.artifacts.tensors import load_tensors, save_tensors
from fedssl.models import build_encoder, initialised
from fedssl.protocol.model import EncoderConfig
from support.commands import fedssl
from support.weights import encoder_file, encoder_tensors

SPEC = """
name = "tiny"
num_rounds = 1
[model.encoder]
widths = [4, 8]
[model.projector]
hidden_dims = [8]
out_dim = 4
[data]
channels = 1
image_size = 8
[training]
batch_size = 64
[partition]
dataset = "digits"
num_clients = 2
scheme = "iid"
max_images = 200
[evaluation]
dataset = "digits"
measures = ["knn"]
max_train = 100
[watch]
num_images = 0
"""


@pytest.fixture
def spec(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.toml"
    path.write_text(SPEC)
    return path


def test_the_table_shows_what_happens_to_each_tensor(tmp_path: Path, spec: Path) -> None:
    tensors = {name.removeprefix("encoder."): each for name, each in encoder_tensors().items()}
    save_tensors(tensors | {"fc.weight": torch.zeros(3, 8)}, tmp_path / "a.safetensors")
    result = fedssl("weights", "check", tmp_path / "a.safetensors", spec, "--format", "json")
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    fates = {row["name"]: row["fate"] for row in document["tensors"]}
    assert document["fits"]
    assert fates.pop("fc.weight") == "left out"
    assert fates == dict.fromkeys(tensors, "loaded")
    shown = fedssl("weights", "check", tmp_path / "a.safetensors", spec)
    assert "4 x 1 x 3 x 3" in shown.stdout
    assert "these weights fit: 12 tensors loaded; 1 left out (fc.weight)" in shown.stderr


def test_weights_that_do_not_fit_exit_with_1(tmp_path: Path, spec: Path) -> None:
    file = encoder_file(tmp_path, EncoderConfig(widths=(4, 9)))
    result = fedssl("weights", "check", file, spec)
    assert result.exit_code == 1
    assert "these weights do not fit: 7 tensors loaded; 5 misfit" in result.stderr
    colour = encoder_file(tmp_path, channels=3, seed=3)
    assert fedssl("weights", "check", colour, spec).exit_code == 1
    adapted = ("--set", "model.initial.weights=x", "--set", 'model.initial.adapt=["blocks.0.conv"]')
    assert fedssl("weights", "check", colour, spec, *adapted).exit_code == 0


def test_adaptations_that_a_run_would_refuse_are_refused(tmp_path: Path, spec: Path) -> None:
    adapted = ("--set", "model.initial.weights=x", "--set", 'model.initial.adapt=["blocks.0.conv"]')
    result = fedssl("weights", "check", encoder_file(tmp_path), spec, *adapted)
    assert result.exit_code != 0
    assert "model.initial.adapt names blocks.0.conv, whose shapes are equal" in result.stderr.replace("\n", " ")


def test_the_weights_of_a_vit_start_a_simulation_with_another_image_size(tmp_path: Path, spec: Path) -> None:
    config = EncoderConfig(name="vit-tiny", patch_size=4, depth=1)
    encoder = initialised(lambda: build_encoder(config, 1, 16), 0)
    save_tensors(dict(encoder.state_dict()), tmp_path / "vit.safetensors")
    settings = ("name=vit-tiny", "patch_size=4", "depth=1")
    vit = [word for each in settings for word in ("--set", f"model.encoder.{each}")]
    start = ("--set", f"model.initial.weights={tmp_path / 'vit.safetensors'}")
    wrong = fedssl("weights", "check", tmp_path / "vit.safetensors", spec, *vit)
    assert wrong.exit_code == 1
    assert "1 misfit (pos_embed: [1, 17, 192] in the file, [1, 5, 192] in the" in wrong.stderr.replace("\n", " ")
    adapt = ("--set", 'model.initial.adapt=["pos_embed"]')
    right = fedssl("weights", "check", tmp_path / "vit.safetensors", spec, *vit, *start, *adapt)
    assert right.exit_code == 0, right.output
    result = fedssl(
        "simulate", spec, *vit, *start, *adapt, "--set", "partition.max_images=80", "--out", tmp_path / "out"
    )
    assert result.exit_code == 0, result.output
    assert "1 adapted (pos_embed: [1, 17, 192] in the file" in result.stderr.replace("\n", " ")


def test_a_missing_or_pickled_file_is_refused(tmp_path: Path, spec: Path) -> None:
    assert "there is no file" in fedssl("weights", "check", tmp_path / "none", spec).stderr
    torch.save({}, tmp_path / "a.pth")
    for command in (
        ("weights", "check", tmp_path / "a.pth", spec),
        ("weights", "add", tmp_path / "a.pth", "--as", "a"),
    ):
        result = fedssl(*command)
        assert result.exit_code != 0
        assert "weights_only=True" in result.stderr.replace("\n", "")


def test_a_simulation_shows_its_start_and_its_gain(tmp_path: Path, spec: Path) -> None:
    start = ("--set", f"model.initial.weights={encoder_file(tmp_path)}")
    result = fedssl("simulate", spec, *start, "--out", tmp_path / "out")
    assert result.exit_code == 0, result.output
    assert "12 tensors loaded" in result.stderr
    assert "start: the encoder before the first round, from the weights" in result.stdout.replace("\n", " ")
    initial = load_tensors(tmp_path / "out" / "initial.safetensors")
    assert all(torch.equal(initial[name], each) for name, each in encoder_tensors().items())
    assert "digest: " in (tmp_path / "out" / "spec.yaml").read_text()
    again = fedssl("simulate", spec, *start, "--out", tmp_path / "out")
    assert "finished: nothing to do" in again.stderr.replace("\n", " ")


def test_initial_weights_that_do_not_fit_end_a_dry_run(tmp_path: Path, spec: Path) -> None:
    file = encoder_file(tmp_path, EncoderConfig(widths=(4, 9)))
    result = fedssl("simulate", spec, "--dry-run", "--set", f"model.initial.weights={file}")
    assert result.exit_code != 0
    assert "the weights do not fit model.encoder" in result.stderr.replace("\n", " ")
