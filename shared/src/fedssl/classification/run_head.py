"""The classifier of a run whose sites have labels, in the form of a classifier from a file."""

import json
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from fedssl.artifacts.tensors import Tensors
from fedssl.classification.head_file import read_head
from fedssl.embeddings.encoders import load_model
from fedssl.errors import SpecError
from fedssl.methods.objectives.ridge_probe import SCALE
from fedssl.methods.site_data import wants_site_labels
from fedssl.models.classifier import BIAS, CLASSES, WEIGHT, Head, classes_digest
from fedssl.models.pretrained import read_spec
from fedssl.protocol.methods.ridge_probe import RidgeProbeConfig
from fedssl.run_files import LINEAGE, MODEL, SPEC


def head_at(path: Path) -> Head:
    """Return the classifier of a file of `fedssl classify`, or of a run's folder or model.safetensors.

    Raises SpecError, and ArtifactDamaged if the file of weights is not the one that lineage.json lists.
    """
    if path.is_dir():
        return run_head(path)
    return run_head(path.parent) if path.name == MODEL else read_head(path)


def run_head(folder: Path) -> Head:
    """Return the classifier of a run, from a folder of `fedssl run pull` or `fedssl simulate`.

    Raises SpecError if the run's method gives no classifier of named classes, or its probabilities have no scale yet.
    """
    spec = read_spec(folder / SPEC)
    config = wants_site_labels(spec)
    if config is None:
        raise SpecError(f"{folder} is a run of {spec.method.name}, which has no classifier of named classes")
    tensors = _read(folder / MODEL)
    if CLASSES not in tensors:
        raise SpecError(f"{folder} is a run of an earlier version of {spec.method.name}: run it again")
    if not torch.equal(tensors[CLASSES], classes_digest(config.classes, multi_label=config.multi_label)):
        raise SpecError(f"{folder / SPEC} does not list the classes of the classifier next to it: fetch the run again")
    fit: dict[str, str | float] = {"method": spec.method.name, **_run(folder)}
    if isinstance(config, RidgeProbeConfig):
        fit["scale"] = _scale(tensors, folder)
    about = {**load_model(folder / MODEL).identity(), "fit": fit}
    return Head(tensors[WEIGHT], tensors[BIAS], config.classes, config.multi_label, about)


def _read(path: Path) -> Tensors:
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in (WEIGHT, BIAS, SCALE, CLASSES) if name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise SpecError(f"{path} cannot be read: {str(error).splitlines()[0]}") from None


def _scale(tensors: Tensors, folder: Path) -> float:
    if not (scale := float(tensors[SCALE])):
        raise SpecError(
            f"the scores of {folder} are not probabilities yet, because no site has counted held-out images: give the "
            "run 2 rounds or more"
        )
    return scale


def _run(folder: Path) -> dict[str, str]:
    """Return the id of a pulled run; `fedssl simulate` writes none."""
    try:
        return {"run": str(json.loads((folder / LINEAGE).read_text(encoding="utf-8"))["run"])}
    except (OSError, ValueError, KeyError, TypeError):
        return {}
