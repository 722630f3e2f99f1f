"""Measures of figures on a finished run: angles, norms, classifiers and metrics, compared with direct computations."""

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from fedssl.artifacts.tensors import Tensors, load_tensors, save_tensors
from fedssl.data import ImageData
from fedssl.errors import ResultsError
from fedssl.evaluation import labels_of
from fedssl.evaluation.suite import load_encoder, load_labelled, load_projected
from fedssl.experiments import model_measures as measures
from fedssl.experiments.measures import measure_cell
from fedssl.experiments.papers import Measure, select
from fedssl.experiments.runs import ComputeSettings, FinishedRun, client_models, find_finished, run_in_folder
from fedssl.run_files import MODEL
from support.methods import method_spec

JUDGED = {"dataset": "digits", "every": 0, "max_train": 100, "max_test": 60, "measures": ["knn"]}
SPEC = method_spec("ssd", num_rounds=2, evaluation=JUDGED)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    run_in_folder(SPEC, folder, keep_clients=True)
    return folder


@pytest.fixture(scope="module")
def images() -> ImageData:
    return load_labelled("digits", SPEC.data, max_train=10, max_test=60, seed=0).test


def embeddings(model: Tensors, images: ImageData, *, projected: bool = True) -> NDArray[np.float64]:
    network = (load_projected if projected else load_encoder)(model, SPEC).eval()
    with torch.no_grad():
        pixels = torch.from_numpy(images.images).float() / 255
        if SPEC.data.mean is not None and SPEC.data.std is not None:
            pixels = (pixels - torch.tensor(SPEC.data.mean)[:, None, None]) / torch.tensor(SPEC.data.std)[:, None, None]
        return np.asarray(network(pixels).double().numpy())


def degrees(first: NDArray[np.float64], second: NDArray[np.float64]) -> float:
    cosine = first @ second / (np.linalg.norm(first) * np.linalg.norm(second))
    return float(np.degrees(np.arccos(np.clip(cosine, -1, 1))))


def test_angles_between_classes_match_a_direct_computation(folder: Path, images: ImageData) -> None:
    z, labels = embeddings(load_tensors(folder / MODEL), images), labels_of(images).numpy()
    means = [z[labels == label].mean(axis=0) for label in np.unique(labels)]
    expected = np.mean([degrees(a, b) for at, a in enumerate(means) for b in means[at + 1 :]])

    found = measures.mean_inter_class_angle(folder, SPEC, images, "cpu")

    assert found == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("label", [None, 3])
def test_angles_between_clients_and_the_global_model_match_a_direct_computation(
    folder: Path, images: ImageData, label: int | None
) -> None:
    rows = np.arange(60) if label is None else np.flatnonzero(labels_of(images).numpy() == label)
    z = embeddings(load_tensors(folder / MODEL), images)[rows]
    local = [embeddings(load_tensors(path), images)[rows] for path in client_models(folder)]
    expected = np.mean([[degrees(a, b) for a, b in zip(each, z, strict=True)] for each in local])

    found = measures.mean_local_global_angle(folder, client_models(folder), SPEC, images, label, "cpu")

    assert len(local) == 3
    assert found == pytest.approx(expected, rel=1e-3)
    same = measures.mean_local_global_angle(folder, [folder / MODEL], SPEC, images, label, "cpu")
    assert same == pytest.approx(0, abs=1e-3)


def test_mean_norms_match_a_direct_computation(folder: Path, images: ImageData) -> None:
    for projected in (False, True):
        expected = np.linalg.norm(embeddings(load_tensors(folder / MODEL), images, projected=projected), axis=1)

        found = measures.mean_norm(folder, SPEC, images, "cpu", projected=projected)

        assert found == pytest.approx(expected.mean(), rel=1e-4)


@pytest.mark.parametrize("has_projector", [True, False])
def test_the_uniformity_of_embeddings_matches_a_direct_computation(
    folder: Path, images: ImageData, *, has_projector: bool
) -> None:
    spec = (
        SPEC if has_projector else SPEC.model_copy(update={"model": SPEC.model.model_copy(update={"projector": None})})
    )
    z_ND = embeddings(load_tensors(folder / MODEL), images, projected=has_projector)
    unit_ND = z_ND / np.linalg.norm(z_ND, axis=1, keepdims=True)
    squares = [((a - b) ** 2).sum() for at, a in enumerate(unit_ND) for b in unit_ND[at + 1 :]]

    uniformity = measures.embedding_uniformity(folder, spec, images, "cpu")

    assert uniformity == pytest.approx(-math.log(np.mean(np.exp(-2 * np.array(squares)))), rel=1e-4)


def test_the_accuracy_of_classifiers_is_their_mean(tmp_path: Path, images: ImageData) -> None:
    """A classifier with only a bias always predicts one class, whose share of the test images is its accuracy."""
    encoder = load_tensors(_trained(tmp_path) / MODEL)
    labels = labels_of(images)
    paths = []
    for answer in (1, 2):
        model = {**encoder, "classifier.weight": torch.zeros(10, 16), "classifier.bias": torch.eye(10)[answer]}
        paths.append(tmp_path / f"{answer}.safetensors")
        save_tensors(model, paths[-1])

    found = measures.classifier_accuracy(paths, SPEC, images, "cpu")

    shares = [float((labels == answer).float().mean()) for answer in (1, 2)]
    assert shares[0] != shares[1]
    assert found == pytest.approx(sum(shares) / 2)


def _trained(folder: Path) -> Path:
    run_in_folder(method_spec("ssd", num_rounds=1), folder)
    return folder


def test_metrics_are_those_of_the_last_round(tmp_path: Path) -> None:
    rounds = [
        {"clients": {"a": {"loss": 9.0}}, "num_examples": {"a": 1}, "server": {"distillation_loss": 7.0}},
        {
            "clients": {"a": {"loss": 1.0}, "b": {"loss": 4.0}, "c": {}},
            "num_examples": {"a": 30, "b": 10, "c": 5},
            "server": {"distillation_loss": 0.5},
        },
    ]
    (tmp_path / "history.json").write_text(json.dumps(rounds))

    assert measures.last_client_metric(tmp_path, "loss") == (1.0 * 30 + 4.0 * 10) / 40
    assert measures.last_server_metric(tmp_path, "distillation_loss") == 0.5
    with pytest.raises(ResultsError, match="no metric 'loss/dsr' of the last round's clients"):
        measures.last_client_metric(tmp_path, "loss/dsr")
    with pytest.raises(ResultsError, match="no metric 'loss' of the coordinator"):
        measures.last_server_metric(tmp_path, "loss")


def test_the_cells_of_figures_are_measured_under_their_names(folder: Path) -> None:
    finished = find_finished(SPEC, folder)
    assert finished is not None
    lengths, angles = select("ssd-fig4:+DSR+PD")[0], select("fedx-fig6:FedSimCLR+FedX")[0]

    found = {cell.table: measure_cell(cell, SPEC, finished, folder, ComputeSettings()) for cell in (lengths, angles)}

    assert found["ssd-fig4"].keys() == {"representation norm", "embedding norm", "DSR loss"}
    assert found["ssd-fig4"]["DSR loss"] == measures.last_client_metric(folder, "loss/dsr")
    by_class = found["fedx-fig6"]
    assert by_class.keys() == angles.published.keys()
    classes = [by_class[name] for name in list(angles.published)[2:]]
    assert len(classes) == 10
    assert min(classes) < by_class["local-global angle"] < max(classes)
    assert 0 < by_class["inter-class angle"] < 180


def test_a_measure_that_is_nan_can_be_stored_and_read_again(tmp_path: Path) -> None:
    rounds = [{"clients": {"a": {"loss": math.nan}}, "num_examples": {"a": 1}, "server": {}}]
    (tmp_path / "history.json").write_text(json.dumps(rounds))
    finished = FinishedRun(1, 1, 0, 0, 1.0, {}, {}, [])
    cell = select("flesd-fig5:FLESD")[0]
    cell = replace(cell, measures={"loss": Measure(kind="client_metric", metric="loss")})

    found = [measure_cell(cell, SPEC, finished, tmp_path, ComputeSettings()) for _ in range(2)]

    assert all(math.isnan(each["loss"]) for each in found)
