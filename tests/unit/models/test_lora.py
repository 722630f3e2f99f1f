"""Low-rank adapters: what they compute, which layers have them, and what remains after merging."""

import importlib.metadata
import math

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from torch import nn

from fedssl.errors import SpecError
from fedssl.models import LoRALinear, add_adapters, build_encoder, encoder_of, initialised, load_initial, merged
from fedssl.models.initial import table_for
from fedssl.protocol.data import DataConfig
from fedssl.protocol.model import EncoderConfig, LoRAConfig, ModelConfig

VIT = EncoderConfig(name="vit-tiny", patch_size=8)


def _adapted(rank: int = 2, alpha: float | None = None, layers: tuple[str, ...] = ("*",)) -> nn.Sequential:
    network = initialised(lambda: nn.Sequential(nn.Linear(4, 3), nn.GELU(), nn.Linear(3, 5, bias=False)), 0)
    add_adapters(network, LoRAConfig(rank=rank, alpha=alpha, layers=layers))
    return network


def test_an_adapter_adds_the_scaled_product_of_both_factors() -> None:
    """W = 0, b = (1, 0), A = (1, 2), B = (3, 4)^T, x = (5, 6): A x = 17, so y = b + s (51, 68)."""
    linear = nn.Linear(2, 2)
    with torch.no_grad():
        linear.weight.zero_()
        linear.bias.copy_(torch.tensor([1.0, 0.0]))
    layer = LoRALinear(linear, rank=1, scale=0.5)
    with torch.no_grad():
        layer.lora_a.copy_(torch.tensor([[1.0, 2.0]]))
        layer.lora_b.copy_(torch.tensor([[3.0], [4.0]]))
    assert layer(torch.tensor([[5.0, 6.0]])).tolist() == [[26.5, 34.0]]


def test_an_adapted_layer_starts_with_the_same_output_and_keeps_its_names() -> None:
    plain = initialised(lambda: nn.Sequential(nn.Linear(4, 3), nn.GELU(), nn.Linear(3, 5, bias=False)), 0)
    adapted, x = _adapted(), torch.randn(6, 4, generator=torch.Generator().manual_seed(1))
    assert torch.equal(adapted(x), plain(x))
    own = {f"{layer}.{part}" for layer in (0, 2) for part in ("lora_a", "lora_b", "lora_scale")}
    assert adapted.state_dict().keys() == plain.state_dict().keys() | own
    bound = 1 / math.sqrt(4)  # kaiming_uniform_ with a = sqrt(5): 1 / sqrt(in)
    assert 0 < float(adapted[0].lora_a.detach().abs().max()) <= bound


def test_merged_weights_give_the_output_of_the_adapter() -> None:
    """They are compared with W + (alpha / r) B A, computed by numpy in float64."""
    network, generator = _adapted(rank=2, alpha=3.0), torch.Generator().manual_seed(2)
    with torch.no_grad():
        for layer in (network[0], network[2]):
            layer.lora_b.copy_(torch.randn(layer.lora_b.shape, generator=generator))
    tensors = network.state_dict()
    found = merged(tensors)
    assert set(found) == {"0.weight", "0.bias", "2.weight"}
    for layer in ("0", "2"):
        w, a, b = (tensors[f"{layer}.{part}"].double().numpy() for part in ("weight", "lora_a", "lora_b"))
        np.testing.assert_allclose(found[f"{layer}.weight"].double().numpy(), w + 1.5 * b @ a, rtol=1e-6)
    plain = nn.Sequential(nn.Linear(4, 3), nn.GELU(), nn.Linear(3, 5, bias=False))
    plain.load_state_dict(found)
    x = torch.randn(6, 4, generator=generator)
    torch.testing.assert_close(plain(x), network(x), rtol=1e-5, atol=1e-6)


def test_merging_tensors_without_adapters_changes_nothing() -> None:
    tensors = nn.Linear(2, 3).state_dict()
    assert merged(tensors) == tensors


@pytest.mark.parametrize("lost", ["0.lora_b", "0.lora_scale", "0.weight"])
def test_an_incomplete_adapter_is_refused(lost: str) -> None:
    tensors = _adapted().state_dict()
    del tensors[lost]
    with pytest.raises(SpecError, match="the adapter of 0 is not complete"):
        merged(tensors)


def test_patterns_select_the_adapted_layers() -> None:
    with torch.device("meta"):
        encoder = build_encoder(VIT, 1, 8)
        add_adapters(encoder, LoRAConfig(rank=4))
    adapted = [name for name, module in encoder.named_modules() if isinstance(module, LoRALinear)]
    assert adapted == [f"blocks.{block}.attn.{layer}" for block in range(12) for layer in ("qkv", "proj")]
    with pytest.raises(
        SpecError, match=r"layers names head\.\*, which matches no linear layer .* blocks\.0\.attn\.qkv"
    ):
        add_adapters(build_encoder(VIT, 1, 8), LoRAConfig(rank=4, layers=("*", "head.*")))


def test_a_layer_whose_forward_is_not_called_is_refused() -> None:
    """EVA multiplies by `qkv.weight` itself, so an adapter of `qkv` would have no effect."""
    version = importlib.metadata.version("timm")
    config = {"name": "timm:eva02_tiny_patch14_224", "timm_version": version, "timm_width": 192}
    with torch.device("meta"):
        encoder = build_encoder(EncoderConfig.model_validate(config), 3, 28)
    with pytest.raises(SpecError, match=r"layers names blocks\.0\.attn\.qkv, whose weights the network uses without"):
        add_adapters(encoder, LoRAConfig(rank=2))
    add_adapters(encoder, LoRAConfig(rank=2, layers=("blocks.*.attn.proj",)))


def test_a_rank_above_that_of_a_layer_is_refused() -> None:
    with pytest.raises(SpecError, match=r"rank is 4, and 0 maps 4 numbers to 3: .* above 3; lower model\.lora\.rank"):
        _adapted(rank=4)
    with pytest.raises(ValidationError, match=r"rank is 193, and the layers of vit-tiny have at most the rank 192"):
        ModelConfig(encoder=VIT, lora=LoRAConfig(rank=193))
    assert ModelConfig(encoder=VIT, lora=LoRAConfig(rank=192)).freezes


@pytest.mark.parametrize("name", ["convnet", "resnet18"])
def test_encoders_without_linear_layers_are_refused(name: str) -> None:
    with pytest.raises(ValidationError, match=f"adapts linear layers, and {name} has none: choose a ViT"):
        ModelConfig.model_validate({"encoder": {"name": name}, "lora": {"rank": 2}})


def test_an_encoder_with_adapters_is_merged_when_it_is_loaded_or_starts_another_run() -> None:
    with torch.no_grad():
        encoder = initialised(lambda: build_encoder(VIT, 1, 8), 3)
        add_adapters(encoder, LoRAConfig(rank=2, layers=("blocks.0.attn.qkv",)))
        encoder.get_submodule("blocks.0.attn.qkv").lora_b.normal_(std=0.1)
        images = torch.randn(3, 1, 8, 8, generator=torch.Generator().manual_seed(0))
        expected = encoder.eval()(images)
        tensors = {f"encoder.{name}": tensor for name, tensor in encoder.state_dict().items()}
        data = DataConfig(channels=1, image_size=8)
        torch.testing.assert_close(encoder_of(tensors, VIT, data).eval()(images), expected, rtol=1e-4, atol=1e-5)
        other = initialised(lambda: build_encoder(VIT, 1, 8), 4)
        add_adapters(other, LoRAConfig(rank=1))
        table = load_initial(other, tensors)
        assert (len(table.of("loaded")), len(table.rows)) == (150, 150)
        torch.testing.assert_close(other.eval()(images), expected, rtol=1e-4, atol=1e-5)


def test_weights_with_adapters_are_checked_against_the_layers_that_they_are_merged_into() -> None:
    convnet = build_encoder(EncoderConfig(), 1)
    shapes = {f"encoder.{name}": tuple(each.shape) for name, each in convnet.state_dict().items()}
    assert table_for(EncoderConfig(), DataConfig(channels=1), {**shapes, "encoder.x.lora_a": (1, 2)}).fits
