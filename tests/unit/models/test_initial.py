"""Existing weights are loaded into an encoder: every tensor by its name, or none of them."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from fedssl.errors import SpecError
from fedssl.models import Encoder, build_encoder, import_torchvision, initialised, load_initial
from fedssl.models.initial import loading_table
from fedssl.protocol.model import EncoderConfig

RESNET = EncoderConfig(name="resnet18", stem="imagenet")


def built(config: EncoderConfig = RESNET, channels: int = 3, seed: int = 1) -> Encoder:
    return initialised(lambda: build_encoder(config, channels), seed)


def tensors_of(module: torch.nn.Module) -> dict[str, Tensor]:
    return {f"encoder.{name}": tensor.clone() for name, tensor in module.state_dict().items()}


@torch.no_grad()
def test_a_loaded_encoder_has_the_features_of_the_original_network() -> None:
    network = import_torchvision().models.resnet18(weights=None).eval()
    for name, buffer in network.named_buffers():
        if name.endswith("running_mean"):
            buffer.uniform_(-1, 1, generator=torch.Generator().manual_seed(2))
    images = torch.rand(2, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    encoder = built()
    table = load_initial(encoder, tensors_of(network))
    assert [row.name for row in table.of("left out")] == ["fc.bias", "fc.weight"]
    assert len(table.of("loaded")) == len(encoder.state_dict())
    network.fc = torch.nn.Identity()
    assert torch.allclose(encoder.eval()(images), network(images), rtol=0, atol=1e-6)


def test_only_counters_may_be_missing() -> None:
    tensors = tensors_of(built(seed=2))
    without = {name: each for name, each in tensors.items() if not name.endswith("num_batches_tracked")}
    load_initial(encoder := built(), without)
    assert torch.equal(encoder.state_dict()["conv1.weight"], tensors["encoder.conv1.weight"])
    del tensors["encoder.layer1.0.bn1.bias"]
    before = built().state_dict()
    with pytest.raises(SpecError, match=r"1 missing \(layer1\.0\.bn1\.bias\)"):
        load_initial(encoder := built(), tensors)
    assert all(torch.equal(each, before[name]) for name, each in encoder.state_dict().items())


def test_unknown_tensors_are_refused() -> None:
    larger = built(EncoderConfig(name="resnet50", stem="imagenet"))
    with pytest.raises(SpecError, match=r"unknown \(layer1\.0\.bn3\.bias, .* more\).*Set model\.encoder"):
        load_initial(built(), tensors_of(larger))


def test_another_stem_is_refused_with_both_shapes() -> None:
    with pytest.raises(SpecError, match=r"conv1\.weight: \[64, 3, 7, 7\] in the file, \[64, 3, 3, 3\] in the network"):
        load_initial(built(EncoderConfig(name="resnet18")), tensors_of(built()), ["conv1"])


def test_other_input_channels_are_refused_with_the_setting_that_adapts_them() -> None:
    with pytest.raises(SpecError, match=r'set model\.initial\.adapt = \["conv1"\]'):
        load_initial(built(channels=1), tensors_of(built()))


@pytest.mark.parametrize(("given", "wanted"), [(3, 1), (1, 3)])
@torch.no_grad()
def test_adapted_channels_give_the_same_response_to_a_grey_image(given: int, wanted: int) -> None:
    source = built(channels=given)
    table = load_initial(encoder := built(channels=wanted, seed=2), tensors_of(source), ["conv1"])
    assert [row.name for row in table.of("adapted")] == ["conv1.weight"]
    grey = torch.rand(2, 1, 32, 32, generator=torch.Generator().manual_seed(0))
    found, expected = (
        F.conv2d(grey.expand(-1, channels, -1, -1).double(), each.state_dict()["conv1.weight"].double())
        for each, channels in ((encoder, wanted), (source, given))
    )
    assert torch.allclose(found, expected, rtol=0, atol=1e-6)


@torch.no_grad()
def test_channels_are_summed_and_divided_as_documented() -> None:
    config = EncoderConfig(widths=(1,))
    tensors = tensors_of(built(config, 3))
    tensors["encoder.blocks.0.conv.weight"] = torch.arange(27.0).reshape(1, 3, 3, 3)
    load_initial(one := built(config, 1), tensors, ["blocks.0.conv"])
    expected = torch.tensor([[27.0, 30, 33], [36, 39, 42], [45, 48, 51]])
    assert torch.equal(one.state_dict()["blocks.0.conv.weight"], expected.view(1, 1, 3, 3))
    load_initial(three := built(config, 3), tensors_of(one), ["blocks.0.conv"])
    assert torch.equal(three.state_dict()["blocks.0.conv.weight"][0, 2], expected / 3)


@pytest.mark.parametrize(
    ("adapt", "reason"), [(["conv1"], "leave it out"), (["layer9"], "not a convolution .* conv1"), (["bn1"], "not a")]
)
def test_unnecessary_or_impossible_adaptations_are_refused(adapt: list[str], reason: str) -> None:
    with pytest.raises(SpecError, match=reason):
        load_initial(built(), tensors_of(built()), adapt)


VIT = EncoderConfig(name="vit-tiny", patch_size=4, depth=1)


def vit(size: int, channels: int = 1, seed: int = 1) -> Encoder:
    return initialised(lambda: build_encoder(VIT, channels, size), seed)


@torch.no_grad()
def test_interpolated_positions_equal_the_networks_own_for_images_of_another_size() -> None:
    source, images = vit(16), torch.rand(2, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    table = load_initial(encoder := vit(8, seed=2), tensors_of(source), ["pos_embed"])
    assert [row.name for row in table.of("adapted")] == ["pos_embed"]
    assert torch.equal(encoder.eval()(images), source.eval()(images))


def test_other_positions_are_refused_with_the_setting_that_interpolates_them() -> None:
    with pytest.raises(SpecError, match=r'interpolate the positions, set model\.initial\.adapt = \["pos_embed"\]'):
        load_initial(vit(8), tensors_of(vit(16)))
    both = r'adapt = \["patch_embed\.proj", "pos_embed"\]'
    with pytest.raises(SpecError, match=both):
        load_initial(vit(8), tensors_of(vit(16, channels=3)))
    table = load_initial(vit(8), tensors_of(vit(16, channels=3)), ["patch_embed.proj", "pos_embed"])
    assert len(table.of("adapted")) == 2
    not_square = tensors_of(vit(16)) | {"encoder.pos_embed": torch.zeros(1, 1 + 8, 192)}
    with pytest.raises(SpecError, match=r"pos_embed: \[1, 9, 192\] in the file.*Set model\.encoder to the network"):
        load_initial(vit(8), not_square, ["pos_embed"])
    with pytest.raises(SpecError, match=r"one is patch_embed\.proj, and its position embeddings are pos_embed"):
        load_initial(vit(8), tensors_of(vit(8)), ["cls_token"])


def test_heads_in_the_weights_of_a_run_are_ignored() -> None:
    tensors = tensors_of(built(seed=2)) | {"projector.0.weight": torch.zeros(2, 2)}
    assert load_initial(built(), tensors).fits


def test_weights_without_an_encoder_are_refused() -> None:
    with pytest.raises(SpecError, match="0 tensors loaded"):
        load_initial(built(), {"projector.0.weight": torch.zeros(2, 2)})
    assert not loading_table({}, {}, ()).fits
