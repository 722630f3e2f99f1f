"""Encoders: shapes, names, cost, and weights that depend only on the seed."""

import re

import pytest
import torch

from fedssl.models import add_adapters, build_encoder, import_torchvision, initialised, num_multiply_adds
from fedssl.models.norms import norm_layer
from fedssl.protocol.model import ENCODERS, EncoderConfig, LoRAConfig, NormName

NAME = re.compile(r"^[A-Za-z0-9_]+(\.[A-Za-z0-9_]+)*$")
CONVNET = EncoderConfig()
R18 = EncoderConfig(name="resnet18")
R50 = EncoderConfig(name="resnet50")


@pytest.mark.parametrize("size", [8, 16, 28, 32])
@pytest.mark.parametrize("channels", [1, 3])
def test_the_width_of_a_convnet_does_not_depend_on_the_images_shape(size: int, channels: int) -> None:
    encoder = build_encoder(EncoderConfig(widths=(4, 8, 16, 24)), channels)
    h_BH = encoder(torch.rand(5, channels, size, size))
    assert h_BH.shape == (5, 24)
    assert encoder.feature_dim == 24


@pytest.mark.parametrize(
    ("config", "channels", "size", "feature_dim"),
    [
        (R18, 3, 32, 512),
        (R18, 1, 28, 512),
        (EncoderConfig(name="resnet18", stem="imagenet"), 3, 64, 512),
        (EncoderConfig(name="resnet18", stem="imagenet"), 1, 64, 512),
        (R50, 3, 32, 2048),
    ],
)
def test_resnets_have_their_feature_dimensions(
    config: EncoderConfig, channels: int, size: int, feature_dim: int
) -> None:
    encoder = build_encoder(config, channels).eval()
    with torch.no_grad():
        h_BH = encoder(torch.rand(2, channels, size, size))
    assert h_BH.shape == (2, feature_dim)
    assert encoder.feature_dim == feature_dim


@pytest.mark.parametrize("config", [CONVNET, R18, R50], ids=lambda c: c.name)
def test_tensor_names_have_only_letters_digits_and_dots(config: EncoderConfig) -> None:
    names = list(build_encoder(config, 3).state_dict())
    assert names
    assert all(NAME.match(name) for name in names)


def test_convolutions_exclude_shortcuts() -> None:
    """FedU measures drift over the weights whose name contains conv, as EasyFL does: 17 in a ResNet-18."""
    for config, count in ((R18, 17), (CONVNET, 4)):
        encoder = build_encoder(config, 3)
        names = [name for name, _ in encoder.named_parameters() if "conv" in name]
        assert encoder.convolutions() == names
        assert len(names) == count


@pytest.mark.full(but=4)
@pytest.mark.parametrize("name", [name for name in ENCODERS if name != "timm"])
def test_every_registered_encoder_has_its_declared_width(name: str) -> None:
    config = EncoderConfig(name=name)
    encoder = build_encoder(config, 1, 32).eval()
    assert encoder(torch.zeros(1, 1, 32, 32)).shape == (1, config.feature_dim)
    assert encoder.feature_dim == config.feature_dim
    assert str(config).startswith(name)


def test_first_weights_of_torch_are_the_defaults_of_its_layers() -> None:
    config = EncoderConfig(name="resnet18", first_weights="torch")
    encoder = initialised(lambda: build_encoder(config, 3), 0)
    usual = dict(initialised(lambda: build_encoder(R18, 3), 0).named_parameters())
    for name, weight in encoder.named_parameters():
        if weight.ndim != 4:  # BatchNorm starts alike
            assert torch.equal(weight, usual[name])
            continue
        fan_in = weight[0].numel()
        assert float(weight.detach().abs().max()) <= fan_in**-0.5
        assert float(weight.detach().var()) == pytest.approx(1 / (3 * fan_in), rel=0.05)
        fan_out = weight.shape[0] * weight[0, 0].numel()
        assert float(usual[name].detach().var()) == pytest.approx(2 / fan_out, rel=0.05)
    again = initialised(lambda: build_encoder(config, 3), 0)
    assert all(torch.equal(a, b) for a, b in zip(encoder.parameters(), again.parameters(), strict=True))


def test_first_weights_do_not_change_the_network_and_are_omitted_from_older_specs() -> None:
    other = EncoderConfig(name="resnet18", first_weights="torch")
    assert other.is_same_network(R18)
    assert "first_weights" not in R18.model_dump(mode="json")
    assert EncoderConfig.model_validate(other.model_dump(mode="json")) == other


@pytest.mark.full(but=1)
@pytest.mark.parametrize("name", ["resnet18", "resnet34", "resnet50", "resnet101"])
def test_an_imagenet_resnet_is_torchvisions(name: str) -> None:
    """The same weights give the same output: only the classifier is missing."""
    config = EncoderConfig(name=name, stem="imagenet")
    encoder = build_encoder(config, 3).eval()
    theirs = getattr(import_torchvision().models, name)(weights=None).eval()
    missing, unexpected = theirs.load_state_dict(encoder.state_dict(), strict=False)
    assert missing == ["fc.weight", "fc.bias"]
    assert unexpected == []
    theirs.fc = torch.nn.Identity()
    x = torch.rand(2, 3, 64, 64)
    with torch.no_grad():
        assert torch.equal(encoder(x), theirs(x))


@pytest.mark.parametrize(
    ("config", "shape", "giga"),
    [(R18, (3, 32, 32), 0.555), (R18, (1, 28, 28), 0.456), (R18, (3, 64, 64), 2.22), (R50, (3, 32, 32), 1.30)],
)
def test_multiply_adds_are_the_published_ones(config: EncoderConfig, shape: tuple[int, int, int], giga: float) -> None:
    digits = len(str(giga).split(".")[1])
    assert round(num_multiply_adds(build_encoder(config, shape[0]), shape) / 1e9, digits) == giga


@pytest.mark.parametrize(("name", "norm"), [("convnet", "group"), ("resnet18", "group"), ("convnet", "layer")])
def test_group_and_layer_norm_treat_images_independently_and_have_no_statistics(name: str, norm: NormName) -> None:
    config = EncoderConfig(name=name, norm=norm)
    encoder = initialised(lambda: build_encoder(config, 3), 0).train()
    x = torch.rand(4, 3, 32, 32)
    with torch.no_grad():
        torch.testing.assert_close(encoder(x)[:1], encoder(x[:1]), rtol=1e-4, atol=1e-5)
    assert list(encoder.buffers()) == []
    assert encoder.state_dict().keys() < build_encoder(EncoderConfig(name=name), 3).state_dict().keys()


@torch.no_grad()
def test_layer_norm_is_over_all_channels_and_pixels_of_an_image() -> None:
    layer, x = norm_layer("layer")(3), torch.randn(2, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    expected = torch.nn.functional.layer_norm(x.double(), (3, 4, 4), eps=1e-5)
    torch.testing.assert_close(layer(x).double(), expected, rtol=1e-5, atol=1e-6)
    assert str(EncoderConfig(widths=(8,), norm="layer")) == "convnet 8 (layer norm)"


def test_the_number_of_groups_divides_the_channels() -> None:
    config = EncoderConfig(widths=(4, 24, 31, 128), norm="group")
    groups = [m.num_groups for m in build_encoder(config, 3).modules() if isinstance(m, torch.nn.GroupNorm)]
    assert groups == [4, 8, 1, 32]


def test_group_norm_is_in_the_description_and_the_default_norm_is_not_serialised() -> None:
    assert str(EncoderConfig(name="resnet18", norm="group")) == "resnet18 (cifar stem, group norm)"
    assert str(EncoderConfig(widths=(8,), norm="group")) == "convnet 8 (group norm)"
    assert not EncoderConfig(norm="group").is_same_network(EncoderConfig())
    assert "norm" not in EncoderConfig().model_dump()
    assert EncoderConfig.model_validate(EncoderConfig(norm="group").model_dump()).norm == "group"


def test_multiply_adds_match_a_hand_calculation() -> None:
    encoder = build_encoder(EncoderConfig(widths=(4, 8)), 3)
    assert num_multiply_adds(encoder, (3, 16, 16)) == 8 * 8 * 4 * 27 + 4 * 4 * 8 * 36
    assert num_multiply_adds(torch.nn.Linear(7, 5), (7,)) == 35


def test_counting_multiply_adds_does_not_change_the_encoder() -> None:
    encoder = build_encoder(CONVNET, 3)
    next(encoder.children()).eval()
    before = {name: tensor.clone() for name, tensor in encoder.state_dict().items()}
    flags = [m.training for m in encoder.modules()]
    num_multiply_adds(encoder, (3, 32, 32))
    assert flags == [m.training for m in encoder.modules()]
    assert all(torch.equal(before[name], tensor) for name, tensor in encoder.state_dict().items())
    assert not any(m._forward_hooks for m in encoder.modules())


def test_adapters_add_their_multiply_adds() -> None:
    def build() -> torch.nn.Module:
        return build_encoder(EncoderConfig(name="vit-tiny", patch_size=4), 3, 8)

    encoder, tokens, width, rank = build(), 5, 192, 2
    add_adapters(encoder, LoRAConfig(rank=rank, layers=("*.qkv",)))
    added = 12 * tokens * (width * rank + rank * 3 * width)
    assert num_multiply_adds(encoder, (3, 8, 8)) == num_multiply_adds(build(), (3, 8, 8)) + added


@pytest.mark.parametrize("config", [CONVNET, R18], ids=lambda c: c.name)
def test_initialised_depends_only_on_the_seed(config: EncoderConfig) -> None:
    def build() -> torch.nn.Module:
        return build_encoder(config, 3)

    torch.rand(3)
    first = initialised(build, 7).state_dict()
    state = torch.random.get_rng_state()
    second = initialised(build, 7).state_dict()
    assert torch.equal(state, torch.random.get_rng_state())
    assert all(torch.equal(first[name], second[name]) for name in first)
    other = initialised(build, 8).state_dict()
    assert any(not torch.equal(first[name], other[name]) for name in first)


def test_initialised_accepts_the_whole_range_of_seeds() -> None:
    build = lambda: torch.nn.Linear(2, 2)  # noqa: E731
    assert not torch.equal(initialised(build, 2**63 - 1).weight, initialised(build, 2**31 - 1).weight)


def test_torchvision_can_be_imported_repeatedly() -> None:
    assert import_torchvision() is import_torchvision()
    assert import_torchvision().transforms is not None
