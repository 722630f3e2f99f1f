"""Every encoder: weights of its library give the library's features in round 0, and are exported unchanged."""

import importlib.metadata
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from fedssl.artifacts.tensors import save_tensors
from fedssl.engine import start_run
from fedssl.methods import METHODS
from fedssl.methods.api import Context
from fedssl.models import PretrainedEncoder, build_encoder, encoder_of, import_torchvision, initialised
from fedssl.models.exporting import export_state_dict
from fedssl.models.start_files import read_start
from fedssl.protocol.model import ENCODERS, EncoderConfig
from fedssl.protocol.runs import RunSpec
from support.federation import tiny_spec

SIZE = 32
# Two blocks of each ViT, and a small network of timm: the others have only one size.
SETTINGS: dict[str, dict[str, Any]] = {
    **{name: {"stem": "imagenet"} for name in ENCODERS if name.startswith("resnet")},
    **{name: {"patch_size": 8, "depth": 2} for name in ENCODERS if name.startswith("vit-")},
    "timm": {
        "name": "timm:test_resnet",
        "timm_version": importlib.metadata.version("timm"),
        "timm_width": 96,
    },
}
CHEAP = ("vit-tiny", "timm")


def _theirs(config: EncoderConfig) -> nn.Module:
    """Return the library's network, with a classifier of three classes."""
    models = import_torchvision().models  # before timm, which imports it without our guard
    if config.name.startswith("resnet"):
        network: nn.Module = getattr(models, config.name)(weights=None, num_classes=3)
        return network
    import timm

    if config.has_patches:
        name = f"{config.name.replace('-', '_')}_patch16_224"
        more: dict[str, Any] = {"patch_size": config.patch_size, "depth": config.depth, "img_size": SIZE}
        network = timm.create_model(name, num_classes=3, **more)
    else:
        network = timm.create_model(config.timm_model or config.name.replace("-", "_"), num_classes=3)
    return network


def _trained(network: nn.Module, images: Tensor) -> nn.Module:
    """Train the network on three classes for two steps, so that every weight and statistic changes, and return it."""
    optimizer = torch.optim.SGD(network.parameters(), 0.01)
    for _ in range(2):
        optimizer.zero_grad()
        nn.functional.cross_entropy(network.train()(images), torch.arange(len(images)) % 3).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return network.eval()


def _features(network: nn.Module, images: Tensor) -> Tensor:
    """Return the input of the library's classifier."""
    given: list[Tensor] = []
    layers = [module for module in network.modules() if isinstance(module, nn.Linear) and module.out_features == 3]
    handle = layers[-1].register_forward_hook(lambda module, inputs, output: given.append(inputs[0]))
    network(images)
    handle.remove()
    return given[0]


def _round_zero(spec: RunSpec) -> PretrainedEncoder:
    """Return the encoder that the clients of a run would receive first."""
    start = read_start(spec)
    assert start is not None
    first = start_run(
        METHODS[spec.method.name], Context(spec=spec, round_number=0, client_id=""), initial=start.tensors
    )
    encoder = encoder_of(first.received, spec.model.encoder, spec.data)
    return PretrainedEncoder(encoder, spec.model.encoder, spec.data)


def _starting(config: EncoderConfig, file: Path) -> RunSpec:
    model = {"encoder": config.model_dump(mode="json"), "initial": {"weights": str(file)}}
    return tiny_spec(model=model, data={"channels": 3, "image_size": SIZE})


@pytest.mark.parametrize(
    "name",
    [name if name in CHEAP else pytest.param(name, marks=pytest.mark.full) for name in ENCODERS if name != "convnet"],
)
def test_round_zero_has_the_features_of_the_library_and_export_gives_its_weights(tmp_path: Path, name: str) -> None:
    config = EncoderConfig.model_validate({"name": name, **SETTINGS.get(name, {})})
    images = torch.rand(6, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(0))
    theirs = _trained(initialised(lambda: _theirs(config), 3), images)
    save_file(theirs.state_dict(), tmp_path / "theirs.safetensors")
    pretrained = _round_zero(_starting(config, tmp_path / "theirs.safetensors"))
    with torch.no_grad():
        expected = _features(theirs, images)
        torch.testing.assert_close(pretrained.encoder.eval()(images), expected, rtol=0, atol=1e-6)
    for library in pretrained.encoder.libraries:
        export_state_dict(pretrained, tmp_path / f"{library}.safetensors", library)
        back, again = load_file(tmp_path / f"{library}.safetensors"), theirs.state_dict()
        assert all(torch.equal(tensor, again[key]) for key, tensor in back.items())
        left = _theirs(config).load_state_dict(back, strict=False)
        assert left.unexpected_keys == []
        assert len(left.missing_keys) == 2, "the classifier's"


def test_a_convnet_is_the_same_after_saving_and_starting_a_run_from_it(tmp_path: Path) -> None:
    """The ConvNet is in no other library: `encoder.safetensors` of a run is the start of the next."""
    config = EncoderConfig(widths=(4, 8))
    encoder = initialised(lambda: build_encoder(config, 3), 3)
    encoder(torch.rand(6, 3, SIZE, SIZE))  # changes the statistics
    path = tmp_path / "encoder.safetensors"
    save_tensors({f"encoder.{key}": tensor for key, tensor in encoder.state_dict().items()}, path)
    found = _round_zero(_starting(config, path)).encoder.state_dict()
    assert all(torch.equal(tensor, found[key]) for key, tensor in encoder.state_dict().items())
