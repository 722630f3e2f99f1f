"""Parameter groups: weight decay of norms and biases, and learning rates by layer."""

from typing import Any

import pytest
import torch
from torch import nn

from fedssl import optimizers
from fedssl.engine.optimization import optimizer_for
from fedssl.engine.parameter_groups import are_on_device, move_learning_rates, set_rates
from fedssl.models import build_encoder
from fedssl.protocol.model import ENCODERS, EncoderConfig
from fedssl.protocol.training import OptimizerConfig

NAMES = sorted(ENCODERS.keys() - {"timm"})
NORMS = (nn.BatchNorm2d, nn.GroupNorm, nn.LayerNorm)


def _modules(encoder: EncoderConfig) -> nn.ModuleDict:
    with torch.device("meta"):
        return nn.ModuleDict({"encoder": build_encoder(encoder, 3, 32), "projector": nn.Linear(8, 4)})


def _rates(modules: nn.ModuleDict, **settings: Any) -> dict[str, tuple[float, float]]:
    """Return the learning rate and the weight decay of each parameter."""
    config = OptimizerConfig(learning_rate=0.5, weight_decay=0.1, **settings)
    names = {id(parameter): name for name, parameter in modules.named_parameters()}
    groups = optimizer_for(modules, config, 0.25).param_groups
    return {names[id(each)]: (group["lr"], group["weight_decay"]) for group in groups for each in group["params"]}


def _encoder(name: str) -> EncoderConfig:
    return EncoderConfig.model_validate({"name": name, "patch_size": 8})


def test_by_default_one_group_has_all_parameters_in_order() -> None:
    modules = _modules(_encoder("convnet"))
    [group] = optimizer_for(modules, OptimizerConfig(), 0.25).param_groups
    assert [id(each) for each in group["params"]] == [id(each) for each in modules.parameters()]


@pytest.mark.parametrize("name", NAMES)
def test_norms_and_biases_can_be_excluded_from_weight_decay(name: str) -> None:
    modules = _modules(_encoder(name))
    found = _rates(modules, decay_norms_and_biases=False)
    assert found.keys() == dict(modules.named_parameters()).keys()
    for parameter, rates in found.items():
        module, _, leaf = parameter.rpartition(".")
        is_kept = leaf in ("bias", "gamma") or isinstance(modules.get_submodule(module), NORMS)
        assert (modules.get_parameter(parameter).ndim == 1) == is_kept, parameter
        assert rates == (0.25, 0.0 if is_kept else 0.1), parameter


def test_layers_of_a_vision_transformer_have_the_rates_of_maes_code() -> None:
    """12 blocks: layer numbers 0 (patches) to 12, and 13 for the last LayerNorm and the heads (`util/lr_decay.py`)."""
    found = _rates(_modules(_encoder("vit-tiny")), layer_decay=0.5)
    expected = {
        "encoder.cls_token": 0.25 * 0.5**13,
        "encoder.pos_embed": 0.25 * 0.5**13,
        "encoder.patch_embed.proj.bias": 0.25 * 0.5**13,
        "encoder.blocks.0.attn.qkv.weight": 0.25 * 0.5**12,
        "encoder.blocks.1.norm1.bias": 0.25 * 0.5**11,
        "encoder.blocks.11.mlp.fc2.weight": 0.125,
        "encoder.norm.weight": 0.25,
        "projector.weight": 0.25,
    }
    assert {name: found[name] for name in expected} == {name: (rate, 0.1) for name, rate in expected.items()}


def test_layers_of_convolutional_encoders_have_decayed_rates() -> None:
    found = _rates(_modules(_encoder("resnet18")), layer_decay=0.5)
    names = ["conv1.weight", "bn1.bias", "layer1.0.conv1.weight", "layer3.0.downsample.0.weight", "layer4.1.bn2.weight"]
    assert [found[f"encoder.{name}"][0] / 0.25 for name in names] == [1 / 32, 1 / 32, 1 / 16, 1 / 4, 1 / 2]
    assert found["projector.bias"] == (0.25, 0.1)
    small = _rates(_modules(_encoder("convnet")), layer_decay=0.5)
    assert [small[f"encoder.blocks.{number}.conv.weight"][0] for number in range(4)] == [1 / 64, 1 / 32, 1 / 16, 1 / 8]


@pytest.mark.parametrize("name", NAMES)
def test_every_parameter_belongs_to_one_layer_or_to_the_last_norm(name: str) -> None:
    encoder = _modules(_encoder(name))["encoder"]
    for parameter, _ in encoder.named_parameters():
        layers = [prefixes for prefixes in encoder.layer_prefixes() if parameter.startswith(prefixes)]
        assert len(layers) == (0 if parameter.startswith(("norm.", "head.norm.")) else 1), parameter


def test_new_rates_keep_the_scales_and_the_exclusions_from_weight_decay() -> None:
    modules = nn.ModuleDict({"encoder": build_encoder(EncoderConfig(widths=(4,)), 1), "head": nn.Linear(4, 2)})
    config = OptimizerConfig(layer_decay=0.5, decay_norms_and_biases=False)
    optimizer = optimizer_for(modules, config, 0.1)
    set_rates(optimizer, 0.2, 0.3)
    found = {(group["lr"], group["weight_decay"]) for group in optimizer.param_groups}
    assert found == {(0.1, 0.3), (0.1, 0.0), (0.2, 0.3), (0.2, 0.0)}


@pytest.mark.parametrize("kind", [optimizers.SGD, optimizers.Adam, optimizers.AdamW])
def test_a_learning_rate_on_the_device_gives_the_steps_of_a_python_number(kind: type[torch.optim.Optimizer]) -> None:
    """As on a GPU: one fused kernel, whose rate changes in place. It has 24 bits there, so steps differ by rounding."""
    courses = []
    for on_device in (False, True):
        parameter = nn.Parameter(torch.linspace(-1, 1, 40))
        groups = [{"params": [parameter], "learning_rate_scale": 0.5}]
        optimizer = kind(groups, lr=0.5, weight_decay=0.1, fused=True)  # type: ignore[call-arg]
        if on_device:
            move_learning_rates(optimizer, torch.device("cpu"))
            place = optimizer.param_groups[0]["lr"]
        for step in range(3):
            set_rates(optimizer, 0.3 / (step + 1), 0.1)
            parameter.grad = torch.cos(step * parameter.detach())
            optimizer.step()
        assert are_on_device(optimizer) == on_device
        courses.append(parameter.detach().clone())
    assert optimizer.param_groups[0]["lr"] is place
    torch.testing.assert_close(*courses, rtol=1e-6, atol=1e-7)
