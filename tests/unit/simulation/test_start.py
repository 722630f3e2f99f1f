"""Simulations that start from an existing encoder."""

from pathlib import Path
from typing import Any

import pytest
import torch

from fedssl.artifacts.store import digest_of
from fedssl.artifacts.tensors import Tensors, save_tensors
from fedssl.artifacts.weight_files import read_weights, registered_digest
from fedssl.engine import start_run
from fedssl.errors import MethodError, ResultsError, SpecError
from fedssl.experiments.runs import find_finished, run_in_folder
from fedssl.methods import METHODS
from fedssl.protocol.model import EncoderConfig
from fedssl.protocol.runs import RunSpec
from fedssl.simulation import Result, simulate
from support.methods import ALL_METHODS, context, method_spec, shards
from support.tensors import are_equal
from support.weights import encoder_file, encoder_tensors

ENCODER = EncoderConfig(widths=(8, 16))


def starting(name: str, file: Path | str, **initial: Any) -> RunSpec:
    values = method_spec(name).model_dump(mode="json")
    values["model"]["initial"] = {"weights": str(file), **initial}
    return RunSpec.model_validate(values)


def part(tensors: Tensors, prefix: str) -> Tensors:
    return {name: tensor for name, tensor in tensors.items() if name.startswith(prefix)}


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return encoder_file(tmp_path_factory.mktemp("weights"), ENCODER)


# The coordinator of the other methods trains before the first round, from the start. FedMAE has no ConvNet.
@pytest.mark.parametrize(
    "name", [n for n in ALL_METHODS if n != "fedmae" and not method_spec(n).method.distillation_epochs(0)]
)
def test_round_zero_has_the_given_encoder_and_the_heads_of_the_seed(file: Path, name: str) -> None:
    spec, method = starting(name, file), METHODS[name]
    tensors = {key: torch.from_numpy(array.copy()) for key, array in read_weights(file).arrays.items()}
    first = start_run(method, context(spec, 0), initial=tensors)
    without = start_run(method, context(method_spec(name), 0))
    assert are_equal(part(first.received, "encoder."), encoder_tensors(ENCODER))
    heads = [key for key in first.broadcast if key.startswith(("projector.", "predictor."))]
    assert all(torch.equal(first.broadcast[key], without.broadcast[key]) for key in heads)
    assert first.loaded == f"{len(tensors)} tensors loaded"
    assert without.loaded == ""


@pytest.fixture(scope="module")
def result(file: Path) -> Result:
    spec = starting("fedbyol", file)
    return simulate(spec, shards(spec))


def test_a_simulation_trains_from_the_given_encoder(file: Path, result: Result) -> None:
    assert are_equal(part(result.initial, "encoder."), encoder_tensors(ENCODER))
    assert not are_equal(part(result.model, "encoder."), encoder_tensors(ENCODER))
    assert result.spec.model.initial is not None
    assert result.spec.model.initial.digest == registered_digest(read_weights(file))
    assert len(result.history) == 2


def test_the_same_weights_under_other_names_give_the_same_bits(tmp_path: Path, result: Result) -> None:
    plain = {name.removeprefix("encoder."): tensor for name, tensor in encoder_tensors(ENCODER).items()}
    save_tensors(plain | {"fc.weight": torch.zeros(3, 16), "fc.bias": torch.zeros(3)}, tmp_path / "plain.safetensors")
    spec = starting("fedbyol", tmp_path / "plain.safetensors")
    other = simulate(spec, shards(spec))
    assert are_equal(other.model, result.model)
    assert "2 left out (fc.bias, fc.weight)" in other.loaded


def test_a_run_can_start_from_another_runs_model(tmp_path: Path, result: Result) -> None:
    save_tensors(result.model, tmp_path / "model.safetensors")
    spec = starting("fedsimclr", tmp_path / "model.safetensors")
    assert are_equal(part(simulate(spec, shards(spec)).initial, "encoder."), part(result.model, "encoder."))


@pytest.mark.parametrize("digest", [registered_digest, lambda weights: weights.source_digest])
def test_either_digest_of_the_file_is_accepted_and_others_are_refused(file: Path, digest: Any) -> None:
    spec = starting("fedbyol", file, digest=digest(read_weights(file)))
    assert simulate(spec.model_copy(update={"num_rounds": 1}), shards(spec)).rounds_done == 1
    with pytest.raises(SpecError, match="the file that was registered"):
        simulate(starting("fedbyol", file, digest="0" * 64), shards(spec))


@pytest.mark.parametrize(
    ("initial", "reason"),
    [
        ({"weights": "imagenet-r50"}, "that file cannot be read"),
        ({"weights": None, "run": "00000000-0000-0000-0000-000000000000"}, "which only its coordinator has"),
        ({"adapt": ["blocks.0.conv"]}, "leave it out"),
        ({"adapt": ["conv1"]}, "not a convolution of the encoder: its first one is blocks.0.conv"),
    ],
)
def test_a_start_that_cannot_be_read_is_refused_before_training(
    file: Path, initial: dict[str, Any], reason: str
) -> None:
    with pytest.raises(SpecError, match=reason):
        simulate(starting("fedbyol", file, **initial), shards(method_spec("fedbyol")))


def test_a_pickled_start_is_refused(tmp_path: Path) -> None:
    torch.save({}, tmp_path / "a.pth")
    with pytest.raises(SpecError, match="is pickled"):
        simulate(starting("fedbyol", tmp_path / "a.pth"), shards(method_spec("fedbyol")))


def test_a_run_with_a_start_is_refused_if_the_weights_are_not_given(file: Path) -> None:
    with pytest.raises(MethodError, match="these weights were not given"):
        start_run(METHODS["fedbyol"], context(starting("fedbyol", file), 0))


def test_results_belong_to_the_file_that_was_read(tmp_path: Path) -> None:
    path = encoder_file(tmp_path, ENCODER)
    spec, folder = starting("fedbyol", path), tmp_path / "out"
    run_in_folder(spec, folder, clients=shards(spec))
    assert find_finished(spec, folder) is not None
    path.write_bytes(encoder_file(tmp_path, ENCODER, seed=10).read_bytes())
    with pytest.raises(ResultsError, match="another spec"):
        find_finished(spec, folder)
    assert digest_of(path)


@pytest.mark.parametrize(
    ("initial", "reason"),
    [
        ({}, "needs either weights or run"),
        ({"weights": "a", "run": "00000000-0000-0000-0000-000000000000"}, "needs either weights or run"),
        ({"weights": "a", "round": 1}, "is the round of a run"),
        ({"weights": "a", "adapt": ["conv1", "conv1"]}, "lists a module twice"),
    ],
)
def test_contradictory_starts_are_refused(initial: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        RunSpec.model_validate({"model": {"initial": initial}})


def test_clients_with_their_own_encoders_cannot_have_a_start() -> None:
    values = method_spec("flesd").model_dump(mode="json")
    values["model"]["initial"] = {"weights": "a"}
    values["method"]["reducer"]["client_encoders"] = {"client-0": {"name": "convnet", "widths": [4, 16]}}
    with pytest.raises(ValueError, match="use one of the two"):
        RunSpec.model_validate(values)


def test_a_spec_without_a_start_is_serialised_as_before() -> None:
    assert "initial" not in RunSpec().model_dump(mode="json")["model"]
