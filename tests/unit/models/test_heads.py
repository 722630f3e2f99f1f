"""Projectors and predictors have the layers that the methods' papers describe."""

import torch
from torch import nn

from fedssl.models import build_mlp
from fedssl.protocol.model import MLPConfig


def _kinds(module: nn.Module) -> list[str]:
    return [type(layer).__name__ for layer in module.children()]


def test_byols_head_has_a_hidden_layer_with_batch_norm() -> None:
    head = build_mlp(MLPConfig(hidden_dims=(64,), out_dim=32), 16)
    assert _kinds(head) == ["Linear", "BatchNorm1d", "ReLU", "Linear"]
    assert head[0].bias is None
    assert head[3].bias is not None
    assert head(torch.rand(4, 16)).shape == (4, 32)


def test_fedxs_head_has_no_batch_norm() -> None:
    head = build_mlp(MLPConfig(hidden_dims=(256,), out_dim=256, batch_norm=False), 512)
    assert _kinds(head) == ["Linear", "ReLU", "Linear"]
    assert head[0].bias is not None


def test_orchestras_head_ends_in_batch_norm_without_scale() -> None:
    head = build_mlp(MLPConfig(hidden_dims=(32,), out_dim=8, out_batch_norm=True), 16)
    assert _kinds(head) == ["Linear", "BatchNorm1d", "ReLU", "Linear", "BatchNorm1d"]
    assert head[3].bias is None
    assert head[4].weight is None
    z_BD = head(torch.rand(64, 16))
    assert torch.allclose(z_BD.mean(0), torch.zeros(8), atol=1e-5)


def test_a_head_can_be_linear_and_have_a_given_width() -> None:
    head = build_mlp(MLPConfig(hidden_dims=(), out_dim=8), 16, out_dim=5)
    assert _kinds(head) == ["Linear"]
    assert head(torch.rand(3, 16)).shape == (3, 5)
