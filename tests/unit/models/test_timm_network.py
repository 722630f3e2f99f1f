"""Networks of timm by name: timm's own outputs and tensors, and what is refused."""

import importlib.metadata
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from fedssl.errors import LibraryMissing, SpecError
from fedssl.methods import METHODS
from fedssl.models import build_encoder, import_torchvision, initialised
from fedssl.protocol.model import EncoderConfig, read_encoder
from fedssl.protocol.runs import RunSpec
from fedssl.simulation import simulate
from support.methods import method_spec, shards

VERSION = importlib.metadata.version("timm")
RESNET = {"name": "timm:test_resnet", "timm_version": VERSION, "timm_width": 96}
VIT = {"name": "timm:test_vit", "timm_version": VERSION, "timm_width": 64}


def _spec(encoder: dict[str, Any], method: str = "fedbyol", size: int = 32, **changes: Any) -> RunSpec:
    more = {"data": {"channels": 1, "image_size": size}, "num_rounds": 1, **changes.pop("sections", {})}
    values = method_spec(method, **more).model_dump(mode="json")
    return RunSpec.model_validate(values | {"model": {**values["model"], "encoder": encoder, **changes}})


@torch.no_grad()
@pytest.mark.parametrize("given", [RESNET, VIT], ids=lambda given: given["name"])
def test_an_encoder_of_timm_has_its_outputs_and_names(given: dict[str, Any]) -> None:
    config = EncoderConfig.model_validate(given)
    encoder = initialised(lambda: build_encoder(config, 1, 32), 3)
    import_torchvision()  # before timm, which imports it without our guard
    import timm

    name, more = given["name"].removeprefix("timm:"), {"img_size": 32} if given is VIT else {}
    theirs = initialised(lambda: timm.create_model(name, in_chans=1, num_classes=0, **more), 3).eval()
    assert encoder.training
    assert [key for key, _ in encoder.named_parameters()] == [key for key, _ in theirs.named_parameters()]
    x = torch.rand(3, 1, 32, 32)
    assert torch.equal(encoder.eval()(x), theirs(x))
    assert encoder.libraries == ("timm",)
    assert str(config) == f"{given['name']} (timm {VERSION})"


def test_training_a_timm_network_is_reproducible() -> None:
    spec = _spec(RESNET, size=8, batch_norm="local")
    assert RunSpec.model_validate(spec.model_dump(mode="json")) == spec
    first, second = (simulate(spec, shards(spec)).model for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert "encoder.layer1.0.bn1.weight" in first


@torch.no_grad()
def test_timm_networks_draw_no_random_numbers_in_training() -> None:
    """GhostNet has no dropout layer: it calls the function with its attribute `drop_rate`."""
    config = EncoderConfig.model_validate({"name": "timm:ghostnet_050", "timm_version": VERSION, "timm_width": 1280})
    encoder = build_encoder(config, 1, 32).train()
    x = torch.rand(4, 1, 32, 32)
    assert torch.equal(*(initialised(lambda: encoder(x), seed) for seed in (1, 2)))


def test_names_of_timm_networks_are_parsed() -> None:
    assert read_encoder("timm:test_resnet") == {"name": "timm:test_resnet"}
    config = EncoderConfig.model_validate(RESNET)
    assert (config.name, config.timm_model, config.feature_dim) == ("timm", "test_resnet", 96)
    assert not config.is_same_network(EncoderConfig.model_validate(VIT))
    assert {"timm_model", "timm_version", "timm_width"}.isdisjoint(EncoderConfig().model_dump())


@pytest.mark.parametrize(
    ("encoder", "error", "reason"),
    [
        ({**RESNET, "timm_version": "0.9.0"}, LibraryMissing, rf"needs timm 0\.9\.0, and {VERSION} is installed here"),
        ({**RESNET, "name": "timm:test_resnets"}, SpecError, "similar names are test_resnet"),
        (
            {**RESNET, "timm_width": 64},
            SpecError,
            r"the shape \(96,\), and model\.encoder\.timm_width is 64: set",
        ),
        (
            {**RESNET, "name": "timm:levit_128s"},
            SpecError,
            "cannot take images of 40 pixels: .*; change data",
        ),
        ({**VIT, "name": "timm:xcit_nano_12_p16_224"}, SpecError, "cannot be built for 1 channel and images of 40"),
    ],
)
def test_networks_that_cannot_be_built_are_refused_before_training(
    encoder: dict[str, Any], error: type[Exception], reason: str
) -> None:
    spec = _spec(encoder, size=40)
    with pytest.raises(error, match=reason):
        _ = METHODS["fedbyol"].bind(spec).plan


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"encoder": {"name": "timm:test_resnet"}}, "needs timm_version, the version that the coordinator and all"),
        ({"encoder": {"name": "timm"}}, 'write name = "timm:regnety_004"'),
        ({"encoder": {**RESNET, "name": "timm:hf-hub:some/where"}}, "timm_model"),
        (
            {"encoder": RESNET, "sections": {"training": {"gradient_checkpointing": True}}},
            "does not declare: leave",
        ),
        ({"encoder": RESNET, "sections": {"training": {"optimizer": {"layer_decay": 0.5}}}}, "an order of its layers"),
        ({"encoder": RESNET, "method": "fedu"}, "does not declare any: set method.merge.distance to paper"),
    ],
)
def test_invalid_settings_of_a_timm_network_are_refused_when_the_spec_is_read(
    changes: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ValidationError, match=reason):
        _spec(**changes)
