"""A pulled encoder is loaded in one line, and exported for other programs with the same outputs."""

from pathlib import Path

import pytest
import torch
from onnxruntime import InferenceSession
from safetensors.torch import load_file
from typer.testing import CliRunner

from fedssl.cli.main import app
from fedssl.data import normalize
from fedssl.errors import ExportError, SpecError
from fedssl.models import import_torchvision, load_encoder
from fedssl.models.exporting import export_onnx, export_state_dict
from fedssl.run_files import write_spec
from support.encoder_folders import write_encoder_folder
from support.federation import tiny_spec

pytestmark = pytest.mark.full


NORMALISED = {"channels": 1, "image_size": 8, "mean": [0.5], "std": [0.25]}


@pytest.fixture
def images() -> torch.Tensor:
    return torch.rand(5, 1, 8, 8, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("file", ["encoder.safetensors", "model.safetensors"])
@torch.no_grad()
def test_a_pulled_encoder_is_loaded_with_its_normalisation(tmp_path: Path, images: torch.Tensor, file: str) -> None:
    spec = tiny_spec(data=NORMALISED)
    original = write_encoder_folder(tmp_path, spec, file)
    for place in (tmp_path, str(tmp_path / file)):
        encoder = load_encoder(place)
        assert not encoder.training
        assert encoder.feature_dim == 8
        assert torch.equal(encoder(images), original(normalize(images, spec.data)))


def test_missing_or_unfitting_files_are_reported(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="fedssl run pull"):
        load_encoder(tmp_path)
    write_encoder_folder(tmp_path, tiny_spec())
    write_spec(tiny_spec(model={"encoder": {"widths": [4, 9]}}), tmp_path / "spec.yaml")
    with pytest.raises(
        SpecError, match=r"does not hold the encoder that the spec describes: .* tensors loaded; .* misfit"
    ):
        load_encoder(tmp_path)
    (tmp_path / "spec.yaml").write_text("num_rounds: many")
    with pytest.raises(SpecError, match=r"spec\.yaml is not a run spec:\n  num_rounds: should be a valid integer"):
        load_encoder(tmp_path)
    (tmp_path / "spec.yaml").write_text("[")
    with pytest.raises(SpecError, match="not a run spec that this version can read"):
        load_encoder(tmp_path)
    (tmp_path / "spec.yaml").unlink()
    with pytest.raises(SpecError, match=r"there is no .*spec\.yaml"):
        load_encoder(tmp_path)


def test_the_onnx_graph_gives_the_same_representations(tmp_path: Path, images: torch.Tensor) -> None:
    write_encoder_folder(tmp_path, tiny_spec(data=NORMALISED))
    encoder = load_encoder(tmp_path)
    export_onnx(encoder, tmp_path / "encoder.onnx")
    session = InferenceSession(tmp_path / "encoder.onnx", providers=["CPUExecutionProvider"])
    for batch in (images, images[:1]):
        (found,) = session.run(["representations"], {"images": batch.numpy()})
        torch.testing.assert_close(torch.from_numpy(found), encoder(batch).detach())
    assert not list(tmp_path.glob(".*"))


def _theirs(form: str) -> torch.nn.Module:
    """Return the ResNet-18 of torchvision or timm."""
    models = import_torchvision().models
    if form == "torchvision":
        return models.resnet18(weights=None)
    import timm

    return timm.create_model("resnet18", pretrained=False)


@pytest.mark.parametrize("form", ["torchvision", "timm"])
def test_a_resnet_can_be_loaded_into_other_libraries_networks(tmp_path: Path, form: str) -> None:
    encoder = {"name": "resnet18", "stem": "imagenet"}
    original = write_encoder_folder(tmp_path, tiny_spec(model={"encoder": encoder}, data={"image_size": 32}))
    done = CliRunner().invoke(app, ["export", str(tmp_path), "--to", form])
    assert done.exit_code == 0, done.output
    theirs = _theirs(form)
    left = theirs.load_state_dict(load_file(tmp_path / f"encoder-{form}.safetensors"), strict=False)
    assert (left.missing_keys, left.unexpected_keys) == (["fc.weight", "fc.bias"], [])
    theirs.fc = torch.nn.Identity()
    batch = torch.rand(2, 3, 32, 32)
    with torch.no_grad():
        assert torch.equal(theirs.eval()(batch), original(batch))


def test_a_convnet_cannot_be_exported_to_other_libraries(tmp_path: Path) -> None:
    write_encoder_folder(tmp_path, tiny_spec())
    with pytest.raises(ExportError, match="ONNX"):
        export_state_dict(load_encoder(tmp_path), tmp_path / "x")
