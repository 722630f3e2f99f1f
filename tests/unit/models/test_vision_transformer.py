"""Vision transformers: timm's outputs and names, their cost, their export, and what is refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
from onnxruntime import InferenceSession
from pydantic import ValidationError
from safetensors.torch import load_file

from fedssl.errors import ExportError
from fedssl.models import (
    VisionTransformer,
    build_encoder,
    import_torchvision,
    initialised,
    load_encoder,
    num_multiply_adds,
)
from fedssl.models.exporting import export_onnx, export_state_dict
from fedssl.protocol.model import ENCODERS, EncoderConfig
from fedssl.simulation import simulate
from support.encoder_folders import write_encoder_folder
from support.federation import tiny_spec
from support.methods import method_spec, shards

VITS = [name for name in ENCODERS if name.startswith("vit-")]


def _timms(config: EncoderConfig, channels: int, size: int) -> torch.nn.Module:
    import_torchvision()  # before timm, which imports it without our guard
    import timm

    network: torch.nn.Module = timm.create_model(
        f"{config.name.replace('-', '_')}_patch16_224",
        patch_size=config.patch_size,
        depth=config.depth,
        img_size=size,
        in_chans=channels,
        num_classes=0,
        global_pool="token" if config.pooling == "class_token" else "avg",
    )
    return network.eval()


@pytest.mark.parametrize("pooling", ["class_token", "mean"])
@pytest.mark.parametrize(
    ("name", "patch_size", "channels", "size"),
    [
        ("vit-tiny", 4, 1, 8),
        ("vit-tiny", 14, 3, 28),
        pytest.param("vit-small", 8, 3, 32, marks=pytest.mark.full),
        pytest.param("vit-base", 16, 3, 32, marks=pytest.mark.full),
    ],
)
@torch.no_grad()
def test_a_vit_has_timms_outputs_and_names(name: str, patch_size: Any, channels: int, size: int, pooling: Any) -> None:
    config = EncoderConfig(name=name, patch_size=patch_size, pooling=pooling)
    encoder, theirs = build_encoder(config, channels, size).eval(), _timms(config, channels, size)
    x = torch.rand(3, channels, size, size)
    encoder.load_state_dict(theirs.state_dict())  # raises if a name or a shape differs
    torch.testing.assert_close(encoder(x), theirs(x), rtol=1e-5, atol=1e-6)
    assert encoder(x).shape == (3, config.feature_dim)


@torch.no_grad()
def test_initial_weights_are_distributed_as_timms() -> None:
    encoder = initialised(lambda: build_encoder(EncoderConfig(name="vit-tiny", patch_size=8), 3, 32), 0)
    theirs = initialised(lambda: _timms(EncoderConfig(name="vit-tiny", patch_size=8), 3, 32), 0)
    for name, tensor in theirs.state_dict().items():
        found = encoder.state_dict()[name]
        assert float(found.mean()) == pytest.approx(float(tensor.mean()), abs=2e-3), name
        assert float(found.square().mean().sqrt()) == pytest.approx(float(tensor.square().mean().sqrt()), rel=0.1), name


@torch.no_grad()
def test_attention_follows_its_equation() -> None:
    """softmax(q k^T / sqrt(d)) v per head is computed in float64 and in loops."""
    encoder = build_encoder(EncoderConfig(name="vit-tiny", patch_size=4), 1, 8).double()
    attention = encoder.get_submodule("blocks.0.attn")
    x = torch.randn(2, 5, 192, dtype=torch.float64)
    qkv = x @ attention.qkv.weight.T + attention.qkv.bias  # type: ignore[union-attr,operator]
    mixed = torch.zeros_like(x)
    for i in range(2):
        for head in range(3):
            q, k, v = (qkv[i, :, part * 192 + head * 64 : part * 192 + (head + 1) * 64] for part in range(3))
            mixed[i, :, head * 64 : (head + 1) * 64] = torch.softmax(q @ k.T / 8, dim=1) @ v
    expected = mixed @ attention.proj.weight.T + attention.proj.bias  # type: ignore[union-attr,operator]
    torch.testing.assert_close(attention(x), expected)


def test_multiply_adds_include_attention() -> None:
    encoder = build_encoder(EncoderConfig(name="vit-tiny", patch_size=4), 3, 8)
    tokens, width = 5, 192
    block = 12 * tokens * width**2 + 2 * tokens**2 * width
    assert num_multiply_adds(encoder, (3, 8, 8)) == 4 * 48 * width + 12 * block


@pytest.mark.parametrize("name", VITS)
def test_a_vit_can_be_built_on_the_meta_device(name: str) -> None:
    with torch.device("meta"):
        encoder = build_encoder(EncoderConfig(name=name), 3, 224)
    assert encoder(torch.empty(2, 3, 224, 224, device="meta")).shape == (2, encoder.feature_dim)
    assert encoder.convolutions() == []


def test_an_image_size_that_patches_do_not_divide_is_refused_with_a_suggestion() -> None:
    with pytest.raises(ValidationError, match=r"28 is not a multiple of that: set data.image_size to 32"):
        tiny_spec(model={"encoder": {"name": "vit-tiny"}}, data={"image_size": 28})
    with pytest.raises(ValidationError, match="patch_size"):
        EncoderConfig(name="vit-tiny", patch_size=7)
    with pytest.raises(ValueError, match="build it with the size of its images"):
        build_encoder(EncoderConfig(name="vit-tiny"), 3)


def test_a_clients_own_encoder_must_also_fit_the_images() -> None:
    spec = method_spec("flesd").model_dump(mode="json")
    spec["method"]["reducer"]["client_encoders"] = {"client-1": {"name": "vit-tiny", "patch_size": 16}}
    with pytest.raises(ValidationError, match=r"8 is not a multiple of that: set data.image_size to 16"):
        type(method_spec("flesd")).model_validate(spec)


def test_settings_are_in_the_description_and_defaults_are_not_serialised() -> None:
    config = EncoderConfig(name="vit-small", patch_size=8, pooling="mean")
    assert str(config) == "vit-small (patches of 8, mean)"
    assert not config.is_same_network(EncoderConfig(name="vit-small", patch_size=4, pooling="mean"))
    assert str(EncoderConfig(name="vit-tiny", depth=1)) == "vit-tiny (patches of 16, class token, 1 block)"
    assert {"patch_size", "pooling", "depth"}.isdisjoint(EncoderConfig(name="vit-small").model_dump())
    assert EncoderConfig.model_validate(config.model_dump(mode="json")) == config


@pytest.mark.parametrize("name", ["fedsimclr", pytest.param("fedema", marks=pytest.mark.full)])
def test_a_vit_trains_in_a_federation(name: str) -> None:
    model = {**method_spec(name).model.model_dump(), "encoder": {"name": "vit-tiny", "patch_size": 4, "depth": 2}}
    spec = method_spec(name, model=model, num_rounds=1)
    result = simulate(spec, shards(spec))
    start = initialised(lambda: build_encoder(spec.model.encoder, 1, 8), 0).state_dict()
    assert {key.removeprefix("encoder.") for key in result.model if key.startswith("encoder.")} == start.keys()
    assert all(bool(tensor.isfinite().all()) for tensor in result.model.values())


@pytest.mark.full
@torch.no_grad()
def test_a_vit_is_exported_to_onnx_and_timm(tmp_path: Path) -> None:
    vit = {"name": "vit-tiny", "patch_size": 4, "pooling": "mean", "depth": 3}
    write_encoder_folder(tmp_path, tiny_spec(model={"encoder": vit}, data={"channels": 1, "image_size": 8}))
    encoder, images = load_encoder(tmp_path), torch.rand(3, 1, 8, 8)
    export_onnx(encoder, tmp_path / "encoder.onnx")
    session = InferenceSession(tmp_path / "encoder.onnx", providers=["CPUExecutionProvider"])
    (found,) = session.run(["representations"], {"images": images.numpy()})
    torch.testing.assert_close(torch.from_numpy(found), encoder(images), rtol=1e-4, atol=1e-5)
    export_state_dict(encoder, tmp_path / "timm.safetensors", "timm")
    theirs = _timms(encoder.config, 1, 8)
    theirs.load_state_dict(load_file(tmp_path / "timm.safetensors"))
    torch.testing.assert_close(theirs(images), encoder(images), rtol=1e-5, atol=1e-6)
    with pytest.raises(ExportError, match=r"torchvision has no such vit-tiny .* export it to timm or ONNX"):
        export_state_dict(encoder, tmp_path / "x", "torchvision")


def test_positions_of_smaller_images_are_interpolated() -> None:
    """Four by four patches become two by two, compared with torch's bicubic interpolation of each number's grid."""
    encoder = initialised(lambda: build_encoder(EncoderConfig(name="vit-tiny", patch_size=4), 1, 16), 0)
    assert isinstance(encoder, VisionTransformer)
    assert encoder._positions(4, 4) is encoder.pos_embed
    found = encoder._positions(2, 2).detach()
    assert found.shape == (1, 5, 192)
    assert torch.equal(found[:, 0], encoder.pos_embed[:, 0].detach())
    grid = encoder.pos_embed.detach()[0, 1:, 7].reshape(1, 1, 4, 4)
    expected = torch.nn.functional.interpolate(grid, size=(2, 2), mode="bicubic", align_corners=False)
    torch.testing.assert_close(found[0, 1:, 7], expected.flatten())
    with torch.no_grad():
        assert encoder(torch.zeros(2, 1, 8, 8)).shape == (2, 192)
