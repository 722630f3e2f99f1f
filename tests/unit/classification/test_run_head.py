"""The classifier of a ridge-probe run is used like one that was fitted locally."""

import csv
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from fedssl.artifacts.tensors import load_tensors, save_tensors
from fedssl.classification.run_head import head_at, run_head
from fedssl.data import ImageData
from fedssl.data.site_labels import SiteLabels
from fedssl.embeddings.encoders import load_model
from fedssl.engine import run_aggregation, run_local_round, start_run
from fedssl.errors import SpecError
from fedssl.methods import METHODS
from fedssl.methods.api import Context, Update
from fedssl.methods.site_data import with_site_labels
from fedssl.protocol.methods.ridge_probe import RidgeProbeConfig
from fedssl.run_files import MODEL, SPEC, write_spec
from fedssl.simulation import simulate
from support.commands import error_of, output_of
from support.federation import tiny_spec

COLOURS = {"blue": (60, 60, 200), "red": (200, 60, 60)}
SPEC_OF_PROBE = tiny_spec(
    method={"name": "ridge-probe", "classes": list(COLOURS), "min_images": 8},
    data={"channels": 3, "image_size": 12, "mean": [0.5, 0.4, 0.3], "std": [0.25, 0.2, 0.3]},
    cohort={"min_clients": 2, "min_updates": 1},
    num_rounds=2,
)


def _site(num_images: int, seed: int) -> ImageData:
    rng = np.random.default_rng(seed)
    labels = np.arange(num_images) % 2
    colours = np.array(list(COLOURS.values()))[labels][:, :, None, None]
    pixels = (colours + rng.normal(0, 50, (num_images, 3, 12, 12))).clip(0, 255).astype(np.uint8)
    return ImageData(pixels, labels, tuple(COLOURS))


def _folder(folder: Path, num_rounds: int = 2) -> Path:
    """Write a folder as `fedssl simulate` does, of a run over two sites."""
    spec = SPEC_OF_PROBE.model_copy(update={"num_rounds": num_rounds})
    result = simulate(spec, {"lab-a": _site(40, 0), "lab-b": _site(30, 1)})
    folder.mkdir()
    write_spec(spec, folder / SPEC)
    save_tensors(result.model, folder / MODEL)
    return folder


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    test = _site(20, 2)
    assert test.labels is not None
    for number, (pixels, label) in enumerate(zip(test.images, test.labels, strict=True)):
        path = Path("images", list(COLOURS)[label], f"{number:02d}.png")
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels.transpose(1, 2, 0)).save(path)
    return _folder(Path("probe"))


def test_images_are_classified_by_the_runs_classifier(run: Path) -> None:
    found = output_of("classify", "images", "--model", "probe", "--head", "probe")
    assert found["classifier"]["method"] == "ridge-probe"
    assert found["classifier"]["scale"] > 0
    with Path("predictions.csv").open(newline="") as file:
        lines = list(csv.DictReader(file))
    assert len(lines) == 20
    assert sum(line["predicted"] == line["path"].split("/")[0] for line in lines) >= 18
    output_of("classify", "images", "--model", "probe", "--head", "probe/model.safetensors", "--out", "again.csv")
    assert Path("again.csv").read_bytes() == Path("predictions.csv").read_bytes()


@pytest.mark.full
def test_the_runs_classifier_is_exported_with_the_encoder(run: Path) -> None:
    found = output_of("export", "probe", "--to", "onnx", "--head", "probe")
    assert found["file"] == "probe/classifier.onnx"
    assert found["classes"] == list(COLOURS)


def test_the_head_gives_the_logits_of_the_run(run: Path) -> None:
    head, tensors = head_at(run), load_tensors(run / MODEL)
    assert torch.equal(head.weight, tensors["classifier.weight"])
    assert torch.equal(head.bias, tensors["classifier.bias"])
    assert head.class_names == tuple(COLOURS)
    solutions, scale = tensors["probe.solutions"], float(tensors["probe.scale"])
    weights = torch.cat([head.weight.T, head.bias[None]]).double()
    assert any(torch.allclose(weights, scale * each, rtol=1e-5, atol=1e-9) for each in solutions)


def test_scores_without_a_scale_are_not_reported_as_probabilities(run: Path) -> None:
    _folder(Path("one-round"), num_rounds=1)
    assert "2 rounds or more" in error_of("classify", "images", "--model", "one-round", "--head", "one-round")
    tensors = load_tensors(run / MODEL)
    del tensors["classes.sha256"]
    save_tensors(tensors, run / MODEL)
    with pytest.raises(SpecError, match="earlier version of ridge-probe"):
        run_head(run)


def test_classes_in_another_order_are_refused(run: Path) -> None:
    config = SPEC_OF_PROBE.method.model_copy(update={"classes": ("red", "blue")})
    write_spec(SPEC_OF_PROBE.model_copy(update={"method": config}), run / SPEC)
    with pytest.raises(SpecError, match="does not list the classes of the classifier next to it"):
        run_head(run)


def test_a_run_without_named_classes_has_no_classifier(run: Path) -> None:
    write_spec(tiny_spec(data=SPEC_OF_PROBE.data.model_dump(mode="json")), run / SPEC)
    assert "no classifier of named classes" in error_of("classify", "images", "--model", "probe", "--head", "probe")


def test_a_classifier_of_another_encoder_is_refused(run: Path) -> None:
    other = Path("other")
    other.mkdir()
    write_spec(SPEC_OF_PROBE, other / SPEC)
    tensors = load_tensors(run / MODEL)
    name = next(name for name in tensors if name.startswith("encoder.") and name.endswith("weight"))
    save_tensors({**tensors, name: tensors[name] + 1}, other / MODEL)
    assert "fitted to another encoder" in error_of("classify", "images", "--model", "other", "--head", "probe")


def test_several_labels_use_sigmoids(tmp_path: Path) -> None:
    method = {"name": "ridge-probe", "classes": list(COLOURS), "min_images": 8, "multi_label": True}
    spec = SPEC_OF_PROBE.model_copy(update={"method": RidgeProbeConfig.model_validate(method)})
    state, server = start_run(METHODS["ridge-probe"], Context(spec=spec, round_number=0)).state, {}
    site = _site(40, 0)
    assert site.labels is not None
    labels = SiteLabels(np.stack([1 - site.labels, site.labels], axis=1), tuple(COLOURS), ("a", "b"))
    data = with_site_labels(torch.from_numpy(site.images), labels, spec, "lab-a")
    for number in (1, 2):
        ctx = Context(spec=spec, round_number=number, client_id="lab-a")
        sent = run_local_round(METHODS["ridge-probe"], state, None, data, ctx).update
        update = Update("lab-a", len(data), lambda sent=sent: sent)  # type: ignore[misc]
        result = run_aggregation(METHODS["ridge-probe"], state, [update], Context(spec=spec, round_number=number))
        state, server = result.state, result.metrics
    write_spec(spec, tmp_path / SPEC)
    save_tensors(state, tmp_path / MODEL)
    head, h_NH = run_head(tmp_path), load_model(tmp_path).represent(site, "cpu")
    predicted = head.probabilities(h_NH) >= 0.5
    assert head.multi_label
    assert (predicted == torch.from_numpy(labels.labels).bool()).double().mean() > 0.9
    assert server["held_out_accuracy"] > 0.9
