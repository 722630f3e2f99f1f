"""Rank, spread and angles on arrangements whose answer is known."""

import math

import pytest
import torch

from fedssl.evaluation import angle_between, effective_rank, feature_std, inter_class_angles


def _randn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def test_effective_rank_by_hand() -> None:
    assert effective_rank(torch.eye(7)) == pytest.approx(7)
    assert effective_rank(torch.outer(torch.arange(1.0, 6), torch.ones(3))) == pytest.approx(1)
    shares = torch.tensor([3.0, 1.0]) / 4
    expected = math.exp(-float((shares * shares.log()).sum()))
    assert effective_rank(torch.diag(torch.tensor([3.0, 1.0, 0.0]))) == pytest.approx(expected)
    assert effective_rank(torch.zeros(4, 3)) == 0
    assert math.isnan(effective_rank(torch.full((4, 3), math.inf)))


def test_effective_rank_is_invariant_to_scale_and_rotation() -> None:
    h_NH = _randn(200, 16) @ torch.diag(torch.linspace(0.1, 2, 16))
    expected = effective_rank(h_NH)
    rotation = torch.linalg.qr(_randn(16, 16)).Q
    assert effective_rank(37 * h_NH) == pytest.approx(expected)
    assert effective_rank(h_NH @ rotation) == pytest.approx(expected, rel=1e-5)
    assert effective_rank(h_NH.flip(0)) == pytest.approx(expected)


def test_effective_rank_centred_and_normalised() -> None:
    h_NH = _randn(500, 8)
    assert effective_rank(h_NH + 100) < 2
    assert effective_rank(h_NH + 100, center=True) == pytest.approx(effective_rank(h_NH, center=True), rel=1e-4)
    lengths = torch.linspace(0.1, 50, 500).view(-1, 1)
    assert effective_rank(lengths * h_NH, normalize=True) == pytest.approx(
        effective_rank(h_NH, normalize=True), rel=1e-5
    )


def test_feature_std() -> None:
    assert feature_std(_randn(5000, 64)) == pytest.approx(1 / 8, rel=0.02)
    assert feature_std(torch.ones(10, 4)) == pytest.approx(0, abs=1e-9)
    assert feature_std(5 * _randn(100, 4)) == pytest.approx(feature_std(_randn(100, 4)))


def test_angle_between_by_hand() -> None:
    a = torch.tensor([[1.0, 0], [1, 0], [1, 0], [1, 0], [1, 0]])
    b = torch.tensor([[3.0, 0], [0, 2], [-1, 0], [1, 1], [1, 1e-6]])
    expected = torch.tensor([0.0, 90, 180, 45, math.degrees(1e-6)], dtype=torch.float64)
    assert torch.allclose(angle_between(a, b), expected, rtol=1e-6, atol=1e-12)


def test_inter_class_angles() -> None:
    z_ND = torch.tensor([[1.0, 0.1], [1, -0.1], [0, 2], [-3, 0]])
    labels = torch.tensor([0, 0, 4, 7])
    assert inter_class_angles(z_ND, labels).tolist() == pytest.approx([90, 180, 90])
