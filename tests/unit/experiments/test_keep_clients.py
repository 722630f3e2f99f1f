"""`simulate --keep-clients`: the models of the last round's clients, as they were before averaging."""

import json
from pathlib import Path

import pytest
import torch

from fedssl.artifacts.tensors import load_tensors
from fedssl.errors import ResultsError, SpecError
from fedssl.experiments.runs import clear, client_models, run_in_folder
from fedssl.run_files import CLIENTS, HISTORY, MODEL
from support.methods import method_spec


def test_the_global_model_is_the_mean_of_the_kept_models(tmp_path: Path) -> None:
    spec = method_spec("fedsimclr", cohort={"fraction": 0.67})

    run_in_folder(spec, tmp_path, keep_clients=True)

    last = json.loads((tmp_path / HISTORY).read_text())[-1]
    images = last["num_examples"]
    models = {path.stem: load_tensors(path) for path in client_models(tmp_path)}
    assert models.keys() == images.keys()
    assert len(models) == 2
    average = load_tensors(tmp_path / MODEL)
    for name, tensor in average.items():
        assert all(model[name].shape == tensor.shape for model in models.values())
        if tensor.is_floating_point():
            mean = sum(images[client] * model[name].double() for client, model in models.items()) / sum(images.values())
            torch.testing.assert_close(tensor.double(), mean, rtol=1e-5, atol=1e-7)
    first, second = models.values()
    assert not torch.equal(first["encoder.blocks.0.conv.weight"], second["encoder.blocks.0.conv.weight"])


def test_the_model_of_a_client_that_sends_nothing_is_also_kept(tmp_path: Path) -> None:
    run_in_folder(method_spec("single", num_rounds=1), tmp_path, keep_clients=True)

    for path in client_models(tmp_path):
        encoder = load_tensors(tmp_path / f"encoder-{path.stem}.safetensors")
        model = load_tensors(path)
        assert encoder
        assert all(torch.equal(model[name], tensor) for name, tensor in encoder.items())
    assert len(client_models(tmp_path)) == len(list(tmp_path.glob("encoder-*.safetensors"))) > 1


def test_a_finished_run_without_kept_clients_must_be_restarted(tmp_path: Path) -> None:
    spec = method_spec("fedsimclr", num_rounds=1)
    run_in_folder(spec, tmp_path)
    assert not (tmp_path / CLIENTS).exists()

    with pytest.raises(ResultsError, match="without its clients' models: start again with --restart"):
        run_in_folder(spec, tmp_path, keep_clients=True)

    clear(tmp_path)
    run_in_folder(spec, tmp_path, keep_clients=True)
    assert client_models(tmp_path)
    assert run_in_folder(spec, tmp_path, keep_clients=True).num_rounds == 1
    clear(tmp_path)
    assert not client_models(tmp_path), "no model of an earlier run is left"


def test_clients_that_send_no_weights_are_refused_before_training(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="clients of flesd with this reducer send similarity and no weights"):
        run_in_folder(method_spec("flesd"), tmp_path / "run", keep_clients=True)
    assert not (tmp_path / "run").exists()
