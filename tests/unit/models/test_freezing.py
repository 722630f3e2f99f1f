"""Which parameters and statistics of an encoder are frozen."""

import copy
import importlib.metadata
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

from fedssl.errors import SpecError
from fedssl.models import Encoder, build_encoder, freeze, frozen_tensors, initialised
from fedssl.protocol.model import EncoderConfig, ModelConfig

STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


def frozen(patterns: Sequence[str], **config: Any) -> Encoder:
    encoder = initialised(lambda: build_encoder(EncoderConfig(**{"widths": (4, 6), **config}), 1, 8), 0)
    freeze(encoder, patterns)
    return encoder


def test_only_parameters_that_match_a_pattern_are_trained() -> None:
    encoder = frozen(["blocks.1.*"])
    trained = [name for name, parameter in encoder.named_parameters() if parameter.requires_grad]
    assert trained == ["blocks.1.conv.weight", "blocks.1.bn.weight", "blocks.1.bn.bias"]
    first = ("conv.weight", "bn.weight", "bn.bias", *(f"bn.{name}" for name in STATISTICS))
    assert frozen_tensors(encoder) == {f"blocks.0.{name}" for name in first}


@pytest.mark.parametrize(
    ("patterns", "fixed"),
    [
        (["*.conv.weight"], ["blocks.0.bn", "blocks.1.bn"]),  # no BatchNorm has a trained parameter
        (["*.bias", "blocks.0.conv.weight"], []),  # each has one
        (["blocks.1.conv.weight", "blocks.0.bn.weight"], ["blocks.1.bn"]),
        (["*"], []),
    ],
)
def test_statistics_change_if_and_only_if_their_batch_norm_is_trained(patterns: list[str], fixed: list[str]) -> None:
    encoder = frozen(patterns)
    before = copy.deepcopy(encoder.state_dict())
    encoder.train()
    copy.deepcopy(encoder).train()(torch.randn(4, 1, 8, 8))  # a copy is an independent network
    encoder(torch.randn(4, 1, 8, 8))
    moved = {name for name, tensor in encoder.state_dict().items() if not torch.equal(tensor, before[name])}
    norms = ("blocks.0.bn", "blocks.1.bn")
    assert moved == {f"{norm}.{name}" for norm in norms if norm not in fixed for name in STATISTICS}
    assert {name for name in frozen_tensors(encoder) if name.endswith(STATISTICS)} == {
        f"{norm}.{name}" for norm in fixed for name in STATISTICS
    }


def test_a_frozen_batch_norm_normalises_with_its_stored_statistics() -> None:
    encoder = frozen(["blocks.1.*"])
    with torch.no_grad():
        encoder.get_buffer("blocks.0.bn.running_mean").copy_(torch.tensor([1.0, 2.0, 3.0, 4.0]))
        encoder.get_buffer("blocks.0.bn.running_var").fill_(4.0)
    x = torch.tensor([3.0, 6.0, 9.0, 4.0]).view(1, 4, 1, 1)
    found = encoder.train().get_submodule("blocks.0.bn")(x)
    torch.testing.assert_close(found.flatten(), torch.tensor([1.0, 2.0, 3.0, 0.0]), rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_a_frozen_batch_norm_of_timm_keeps_its_activation() -> None:
    given = {"name": "timm:test_efficientnet", "timm_version": importlib.metadata.version("timm"), "timm_width": 256}
    encoder = initialised(lambda: build_encoder(EncoderConfig.model_validate(given), 1, 32), 0)
    x = torch.randn(2, 1, 32, 32)
    expected = encoder.eval()(x)
    freeze(encoder, ["conv_stem.weight"])
    assert torch.equal(encoder.train()(x), expected)
    assert torch.equal(copy.deepcopy(encoder).train()(x), expected)


@torch.no_grad()
def test_batch_norms_of_any_dimension_are_frozen() -> None:
    network = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    x = torch.randn(4, 3)
    expected = network.eval()(x)
    freeze(network, ["0.*"])
    assert torch.equal(network.train()(x), expected)
    assert torch.equal(network.get_buffer("1.running_mean"), torch.zeros(2))


def test_frozen_parameters_get_no_gradient() -> None:
    encoder = frozen(["blocks.1.conv.weight"])
    encoder.train()(torch.randn(4, 1, 8, 8)).square().sum().backward()
    assert [name for name, each in encoder.named_parameters() if each.grad is not None] == ["blocks.1.conv.weight"]


def test_freezing_changes_neither_values_nor_names_of_tensors() -> None:
    plain = initialised(lambda: build_encoder(EncoderConfig(widths=(4, 6)), 1, 8), 0).state_dict()
    found = frozen(["blocks.0.bn.*"]).state_dict()
    assert list(found) == list(plain)
    assert all(torch.equal(found[name], tensor) for name, tensor in plain.items())


def test_other_normalisations_have_no_frozen_statistics() -> None:
    assert frozen_tensors(frozen(["blocks.1.*"], norm="group")) == {
        f"blocks.0.{name}" for name in ("conv.weight", "bn.weight", "bn.bias")
    }
    vit = frozen(["blocks.11.*", "norm.*"], name="vit-tiny", patch_size=4)
    trained = {name for name, each in vit.named_parameters() if each.requires_grad}
    assert {name.split(".")[0] for name in trained} == {"blocks", "norm"}
    assert frozen_tensors(vit) == dict(vit.named_parameters()).keys() - trained


def test_the_last_stage_of_a_resnet_can_be_selected_by_a_pattern() -> None:
    with torch.device("meta"):
        encoder = build_encoder(EncoderConfig(name="resnet18"), 3)
        freeze(encoder, ["layer4.*"])
    assert {name.split(".")[0] for name in encoder.state_dict().keys() - frozen_tensors(encoder)} == {"layer4"}
    assert not any(each.training for name, each in encoder.train().named_modules() if name == "bn1")


@pytest.mark.parametrize(
    ("pattern", "near"),
    [
        ("layr4.*", r"near ones are layer4\.\*"),
        ("encoder.layer4.*", r"near ones are layer4\.\*"),
        ("layer4", r"near ones are layer4\.\*"),
        ("layer4.1.conv3.weight", r"layer4\.1\.conv2\.weight"),
        ("fc*", r"patterns of this encoder are, for example, conv1\.\*, bn1\.\*, layer1\.\*"),
    ],
)
def test_a_pattern_that_matches_nothing_is_refused_with_similar_names(pattern: str, near: str) -> None:
    with torch.device("meta"):
        encoder: nn.Module = build_encoder(EncoderConfig(name="resnet18"), 3)
    with pytest.raises(SpecError, match=f"matches no parameter of the encoder: .*{near}"):
        freeze(encoder, ["layer1.*", pattern])
    assert all(parameter.requires_grad for parameter in encoder.parameters())


@pytest.mark.parametrize(
    ("trainable", "reason"),
    [
        ([], "no encoder would be trained"),
        (["layer4.*", "layer4.*"], "lists a pattern twice"),
        (["layer4.[0-9]"], "should match pattern"),
        (["*" * 300], "at most 256 characters"),
        ([f"layer{number}.*" for number in range(65)], "at most 64 items"),
    ],
)
def test_invalid_patterns_are_refused_without_building_an_encoder(trainable: list[str], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        ModelConfig.model_validate({"trainable": trainable})


def test_a_fully_trained_model_is_serialised_as_before() -> None:
    assert "trainable" not in ModelConfig().model_dump(mode="json")
    assert ModelConfig(trainable=("*",)).model_dump(mode="json")["trainable"] == ["*"]
