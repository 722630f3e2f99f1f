"""The weights that a simulation starts from: read from a file, as a coordinator reads registered ones."""

from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open

from fedssl.artifacts.tensors import Tensors
from fedssl.artifacts.weight_files import read_weights, registered_digest
from fedssl.errors import ArtifactError, SpecError
from fedssl.models.classifier import BIAS, CLASSES, WEIGHT
from fedssl.protocol.initial import InitialConfig
from fedssl.protocol.runs import RunSpec


@dataclass(frozen=True, slots=True)
class Start:
    """The tensors of an encoder, with those of a classifier of named classes if the file has one, and the digest that a
    coordinator would give to the encoder."""

    tensors: Tensors
    digest: str


def read_start(spec: RunSpec) -> Start | None:
    """Return the weights that the spec starts from, or None if it starts from random ones.

    Raises SpecError if there is no such file, it has no weights, or its digest is not the spec's.
    """
    config = spec.model.initial
    if config is None:
        return None
    path = _path(config)
    try:
        weights = read_weights(path)
    except ArtifactError as error:
        raise SpecError(str(error)) from None
    except OSError as error:
        raise SpecError(
            f"model.initial.weights is {config.weights}, and that file cannot be read ({error.strerror}): a simulation "
            "needs the path of a safetensors file, which --set model.initial.weights=FILE gives"
        ) from None
    digest = registered_digest(weights)
    if config.digest not in (None, digest, weights.source_digest):
        raise SpecError(
            f"model.initial.digest is {config.digest}, but the weights in {path} have digest {digest}: give the file "
            "that was registered, or leave the digest out"
        )
    tensors = {name: torch.from_numpy(array.copy()) for name, array in weights.arrays.items()}
    return Start({**tensors, **_classifier(path)}, digest)


def _classifier(path: Path) -> Tensors:
    """Return the classifier of a run's model, or nothing if the file has none."""
    wanted = (WEIGHT, BIAS, CLASSES)
    with safe_open(path, framework="pt") as file:
        return {name: file.get_tensor(name) for name in wanted} if set(wanted) <= set(file.keys()) else {}


def pinned(spec: RunSpec) -> RunSpec:
    """Return the spec with the digest of the weights that it starts from. Raises SpecError as `read_start` does."""
    start = read_start(spec)
    return spec if start is None else with_digest(spec, start)


def with_digest(spec: RunSpec, start: Start) -> RunSpec:
    """Return the spec with the digest of these weights, which are its own."""
    assert spec.model.initial is not None, "the weights are those of the spec"
    initial = spec.model.initial.model_copy(update={"digest": start.digest})
    return spec.model_copy(update={"model": spec.model.model_copy(update={"initial": initial})})


def _path(config: InitialConfig) -> Path:
    if config.weights is None:
        raise SpecError(
            "model.initial.run names a run, which only its coordinator has: fetch it with `fedssl run pull RUN`, and "
            'give its file instead: initial = { weights = "FOLDER/model.safetensors" }'
        )
    return Path(config.weights)
