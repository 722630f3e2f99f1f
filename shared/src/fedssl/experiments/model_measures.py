"""Measures of a finished run's models and of its last round, as the papers' figures show them."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fedssl.artifacts.tensors import Tensors, load_tensors
from fedssl.data import ImageData
from fedssl.errors import ResultsError
from fedssl.evaluation import extract_features, labels_of
from fedssl.evaluation.geometry import angle_between, inter_class_angles, uniformity
from fedssl.evaluation.suite import load_encoder, load_projected
from fedssl.protocol.runs import RunSpec
from fedssl.run_files import HISTORY, MODEL


def mean_inter_class_angle(folder: Path, spec: RunSpec, test: ImageData, device: str) -> float:
    """Return the mean angle in degrees between the mean embeddings z of every two classes (FedX Eq. 15-16)."""
    z_ND = _embeddings(load_tensors(folder / MODEL), spec, test, device)
    return float(inter_class_angles(z_ND, labels_of(test).to(device)).mean())


def mean_local_global_angle(
    folder: Path, clients: Sequence[Path], spec: RunSpec, test: ImageData, label: int | None, device: str
) -> float:
    """Return the mean angle in degrees between z by a client's and by the global model (FedX Eq. 14).

    It is the mean over the clients and the test images, or those with a label.
    """
    if label is not None:
        test = test.subset(torch.nonzero(labels_of(test) == label).flatten().numpy())
    global_ND = _embeddings(load_tensors(folder / MODEL), spec, test, device)
    angles = [angle_between(_embeddings(load_tensors(path), spec, test, device), global_ND) for path in clients]
    return float(torch.stack(angles).mean())


def mean_norm(folder: Path, spec: RunSpec, test: ImageData, device: str, *, projected: bool) -> float:
    """Return the mean length of the test images' representations h, or of their embeddings z if `projected`."""
    model = load_tensors(folder / MODEL)
    if projected:
        return float(_embeddings(model, spec, test, device).norm(dim=1).mean())
    h_NH = extract_features(load_encoder(model, spec).to(device), test, spec.data, device)
    return float(h_NH.norm(dim=1).mean())


def embedding_uniformity(folder: Path, spec: RunSpec, test: ImageData, device: str) -> float:
    """Return -Lu of the test images' embeddings z, or of h if the model has no projector."""
    return uniformity(_embeddings(load_tensors(folder / MODEL), spec, test, device))


def classifier_accuracy(models: Sequence[Path], spec: RunSpec, test: ImageData, device: str) -> float:
    """Return the test accuracy, 0 to 1, of supervised models' own linear classifiers, as a mean over the models."""
    accuracies = []
    for path in models:
        model = load_tensors(path)
        h_NH = extract_features(load_encoder(model, spec).to(device), test, spec.data, device)
        weight, bias = (model[f"classifier.{name}"].to(device) for name in ("weight", "bias"))
        logits: Tensor = F.linear(h_NH, weight, bias)
        accuracies.append(float((logits.argmax(dim=1).cpu() == labels_of(test)).float().mean()))
    return sum(accuracies) / len(accuracies)


def last_client_metric(folder: Path, metric: str) -> float:
    """Return a metric of the last round's training: the mean over its clients, weighted by their images."""
    last = _last_round(folder)
    values = {name: _number(found[metric]) for name, found in last["clients"].items() if metric in found}
    if not values:
        raise ResultsError(f"{folder / HISTORY} has no metric {metric!r} of the last round's clients")
    images = {name: last["num_examples"][name] for name in values}
    return float(sum(values[name] * images[name] for name in values) / sum(images.values()))


def last_server_metric(folder: Path, metric: str) -> float:
    """Return a metric of the coordinator in the last round."""
    server = _last_round(folder)["server"]
    if metric not in server:
        raise ResultsError(f"{folder / HISTORY} has no metric {metric!r} of the coordinator in the last round")
    return _number(server[metric])


def _number(value: float | None) -> float:
    """Return a number of a run's files, which have null for a number that is not finite."""
    return math.nan if value is None else value


def _embeddings(model: Tensors, spec: RunSpec, test: ImageData, device: str) -> Tensor:
    load = load_encoder if spec.model.projector is None else load_projected
    return extract_features(load(model, spec).to(device), test, spec.data, device)


def _last_round(folder: Path) -> dict[str, Any]:
    found = json.loads((folder / HISTORY).read_text(encoding="utf-8"))
    return dict(found[-1])
