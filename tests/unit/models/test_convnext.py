"""ConvNeXts: timm's outputs and names, import and export of weights, and what is refused."""

from pathlib import Path

import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import save_file
from torch import nn

from fedssl.models import PretrainedEncoder, build_encoder, import_torchvision, initialised, load_initial
from fedssl.models.convnext import ConvNeXt
from fedssl.models.start_files import read_start
from fedssl.models.timm_folder import export_timm_folder
from fedssl.protocol.data import DataConfig
from fedssl.protocol.model import EncoderConfig, LoRAConfig, ModelConfig
from support.federation import tiny_spec

WIDTHS, DEPTHS = (8, 12, 16, 24), (1, 2, 1, 1)


def _timms(name: str, **settings: object) -> nn.Module:
    import_torchvision()  # before timm, which imports it without our guard
    import timm

    network: nn.Module = timm.create_model(name, **settings)
    return network.eval()


@torch.no_grad()
def _scaled(network: nn.Module) -> nn.Module:
    """Return a network whose blocks change their input substantially, and not only by a millionth."""
    for parameter in network.parameters():
        parameter.copy_(torch.randn_like(parameter) * (0.2 if parameter.ndim > 1 else 0.5))
    return network


@torch.no_grad()
def test_a_convnext_has_timms_outputs_and_names() -> None:
    theirs = _scaled(_timms("convnext_tiny", dims=WIDTHS, depths=DEPTHS, in_chans=2, num_classes=0))
    encoder = ConvNeXt(2, WIDTHS, DEPTHS).eval()
    encoder.load_state_dict(theirs.state_dict())  # raises if a name or a shape differs
    x = torch.rand(3, 2, 64, 64)
    torch.testing.assert_close(encoder(x), theirs(x), rtol=1e-5, atol=1e-5)
    assert encoder(x).shape == (3, encoder.feature_dim) == (3, 24)


@pytest.mark.parametrize("name", ["convnext-tiny", "convnext-small"])
def test_the_registered_sizes_are_timms_and_have_no_batch_norm(name: str) -> None:
    with torch.device("meta"):
        encoder = build_encoder(EncoderConfig.model_validate({"name": name}), 3)
        theirs = _timms(name.replace("-", "_"), num_classes=0)
    shapes = {key: tensor.shape for key, tensor in encoder.state_dict().items()}
    assert shapes == {key: tensor.shape for key, tensor in theirs.state_dict().items()}
    assert list(encoder.buffers()) == []
    maps = [key for key, shape in shapes.items() if len(shape) > 1]
    assert encoder.convolutions() == maps  # includes 1x1 convolutions in the form of linear layers


@torch.no_grad()
def test_initial_weights_are_distributed_as_timms() -> None:
    encoder = initialised(lambda: ConvNeXt(3, WIDTHS, DEPTHS), 0)
    theirs = initialised(lambda: _timms("convnext_tiny", dims=WIDTHS, depths=DEPTHS, num_classes=0), 0)
    for name, tensor in theirs.state_dict().items():
        found = encoder.state_dict()[name]
        if tensor.ndim == 1:
            assert torch.equal(found, tensor), name
        else:
            assert float(found.std()) == pytest.approx(float(tensor.std()), rel=0.25), name


@pytest.mark.full
@torch.no_grad()
def test_timms_weights_can_be_imported_and_exported(tmp_path: Path) -> None:
    """A file of timm is a start whose representations are timm's features, and an export gives timm's network again."""
    theirs, images = _scaled(_timms("convnext_tiny", in_chans=3)), torch.rand(2, 3, 32, 32)
    save_file(theirs.state_dict(), tmp_path / "timm.safetensors")
    config = EncoderConfig(name="convnext-tiny")
    model = {"encoder": config.model_dump(), "initial": {"weights": str(tmp_path / "timm.safetensors")}}
    spec = tiny_spec(model=model, data={"channels": 3, "image_size": 32})
    encoder, start = build_encoder(config, 3), read_start(spec)
    assert start is not None
    table = load_initial(encoder, start.tensors)
    assert [row.name for row in table.of("left out")] == ["head.fc.bias", "head.fc.weight"]
    expected = theirs.forward_head(theirs.forward_features(images), pre_logits=True)  # type: ignore[operator]
    torch.testing.assert_close(encoder.eval()(images), expected, rtol=1e-5, atol=1e-5)

    data = DataConfig(channels=3, image_size=32)
    export_timm_folder(PretrainedEncoder(encoder, config, data), None, None, tmp_path / "folder")
    again = _timms(f"local-dir:{tmp_path / 'folder'}", pretrained=True)
    torch.testing.assert_close(again(images), expected, rtol=1e-5, atol=1e-5)


def test_small_images_and_adapters_that_fit_no_layer_are_refused() -> None:
    with pytest.raises(ValidationError, match=r"28 pixels are too few: set data.image_size to 32 or more"):
        tiny_spec(model={"encoder": {"name": "convnext-tiny"}}, data={"image_size": 28})
    assert ModelConfig(encoder=EncoderConfig(name="convnext-tiny"), lora=LoRAConfig(rank=96)).freezes
    with pytest.raises(ValidationError, match="resnet18 has none: choose a ViT or a ConvNeXt"):
        ModelConfig(encoder=EncoderConfig(name="resnet18"), lora=LoRAConfig(rank=2))
