"""Rank, spread and angles of arrangements with known answers."""

import math

import numpy as np
import pytest
import torch

import fedssl.losses
from fedssl.evaluation import (
    alignment,
    angle_between,
    compare_embeddings,
    effective_rank,
    feature_std,
    inter_class_angles,
    uniformity,
)


def _randn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def test_effective_rank_matches_values_worked_out_by_hand() -> None:
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


def test_effective_rank_can_be_centered_and_normalised() -> None:
    h_NH = _randn(500, 8)
    assert effective_rank(h_NH + 100) < 2
    assert effective_rank(h_NH + 100, center=True) == pytest.approx(effective_rank(h_NH, center=True), rel=1e-4)
    lengths = torch.linspace(0.1, 50, 500).view(-1, 1)
    assert effective_rank(lengths * h_NH, normalize=True) == pytest.approx(
        effective_rank(h_NH, normalize=True), rel=1e-5
    )


@pytest.mark.parametrize("shape", [(300, 20), (20, 300), (5000, 6)])
@pytest.mark.parametrize("center", [False, True])
def test_effective_rank_matches_numpys_singular_values(shape: tuple[int, int], *, center: bool) -> None:
    h_NH = (_randn(*shape) * torch.linspace(0.01, 3, shape[1]) + 0.5).numpy().astype(np.float64)
    sigma = np.linalg.svd(h_NH - h_NH.mean(axis=0) if center else h_NH, compute_uv=False)
    sigma = sigma[sigma > 1e-10 * sigma.max()]
    shares = sigma / sigma.sum()
    expected = float(np.exp(-(shares * np.log(shares)).sum()))
    assert effective_rank(torch.from_numpy(h_NH), center=center) == pytest.approx(expected, rel=1e-6)


def test_uniformity_matches_values_worked_out_by_hand() -> None:
    assert uniformity(torch.tensor([[2.0, 0], [-5, 0]])) == pytest.approx(8)  # opposite: d^2 = 4
    assert uniformity(3 * torch.eye(4)) == pytest.approx(4)  # orthogonal: d^2 = 2
    assert uniformity(torch.ones(5, 3)) == pytest.approx(0, abs=1e-6)
    one_pair_alike = torch.tensor([[1.0, 0], [1, 0], [-1, 0]])
    assert uniformity(one_pair_alike) == pytest.approx(-math.log((1 + 2 * math.exp(-8)) / 3), abs=1e-6)
    assert uniformity(torch.zeros(4, 3)) == 0  # a dead ReLU's: they coincide
    half_dead = torch.tensor([[1.0, 0], [0, 1], [0, 0], [0, 0]])  # d^2: 2 once, 1 four times, 0 once
    expected = -math.log((math.exp(-4) + 4 * math.exp(-2) + 1) / 6)
    assert uniformity(half_dead) == pytest.approx(expected, rel=1e-6)
    assert uniformity(half_dead) == pytest.approx(-float(fedssl.losses.uniformity(half_dead)), rel=1e-5)
    assert math.isnan(uniformity(torch.ones(1, 3)))
    assert math.isnan(uniformity(torch.full((3, 2), math.nan)))


def test_uniformity_is_exact_if_all_potentials_are_below_the_smallest_float(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four of the six pairs of a square's corners have d^2 = 2, and two have 4: exp(-400) and exp(-800)."""
    square = torch.tensor([[1.0, 0], [0, 1], [-1, 0], [0, -1]])
    for rows in (2048, 3, 1):
        monkeypatch.setattr("fedssl.evaluation.geometry._ROWS", rows)
        assert uniformity(square, t=200) == pytest.approx(400 - math.log(4 / 6), rel=1e-6)
        assert uniformity(square[::2], t=200) == pytest.approx(800)


def test_without_representations_no_measure_has_a_value() -> None:
    for nothing in (torch.zeros(0, 3), torch.zeros(0, 0)):
        assert math.isnan(effective_rank(nothing))
        assert math.isnan(effective_rank(nothing, center=True, normalize=True))
        assert math.isnan(feature_std(nothing))
        assert math.isnan(uniformity(nothing))
        assert math.isnan(alignment(nothing, nothing))


def test_the_uniformity_of_evenly_spread_directions_has_its_closed_form() -> None:
    # E exp(-4 + 4 cos) = e^-4 0F1(; H/2; 4) for directions spread evenly in H dimensions.
    terms = [4.0**k / (math.factorial(k) * math.prod(256 + i for i in range(k))) for k in range(20)]
    expected = 4 - math.log(sum(terms))
    assert expected == pytest.approx(3.984, abs=1e-3)
    assert uniformity(_randn(3000, 512)) == pytest.approx(expected, abs=2e-3)


def test_uniformity_matches_a_plain_loop_over_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    h_NH = _randn(61, 5) + 0.7
    u = h_NH.numpy().astype(np.float64)
    u /= np.linalg.norm(u, axis=1, keepdims=True)
    potentials = [math.exp(-2 * float(((u[i] - u[j]) ** 2).sum())) for i in range(61) for j in range(i)]
    expected = -math.log(sum(potentials) / len(potentials))
    assert uniformity(h_NH) == pytest.approx(expected, rel=1e-6)
    assert uniformity(h_NH) == pytest.approx(-float(fedssl.losses.uniformity(h_NH)), rel=1e-5)
    monkeypatch.setattr("fedssl.evaluation.geometry._ROWS", 7)
    assert uniformity(h_NH) == pytest.approx(expected, rel=1e-6)
    assert uniformity(10 * h_NH.flip(0)) == pytest.approx(expected, rel=1e-6)


def test_alignment_matches_a_hand_worked_value_and_the_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    assert alignment(torch.tensor([[3.0, 0], [0, 1]]), torch.tensor([[0.0, 2], [0, 9]])) == pytest.approx(1)
    first, second = _randn(50, 6), _randn(50, 6) + 1
    monkeypatch.setattr("fedssl.evaluation.geometry._ROWS", 8)
    assert alignment(first, second) == pytest.approx(float(fedssl.losses.alignment(first, second)), rel=1e-5)


def test_computing_in_pieces_does_not_change_the_results(monkeypatch: pytest.MonkeyPatch) -> None:
    h_NH = _randn(200, 16) + 3
    expected = effective_rank(h_NH), effective_rank(h_NH, center=True), feature_std(h_NH)
    monkeypatch.setattr("fedssl.evaluation.geometry._ROWS", 7)
    assert (effective_rank(h_NH), effective_rank(h_NH, center=True), feature_std(h_NH)) == pytest.approx(expected)


def test_feature_std_has_known_values_and_ignores_scale() -> None:
    assert feature_std(_randn(5000, 64)) == pytest.approx(1 / 8, rel=0.02)
    assert feature_std(torch.ones(10, 4)) == pytest.approx(0, abs=1e-9)
    assert feature_std(5 * _randn(100, 4)) == pytest.approx(feature_std(_randn(100, 4)))


def test_angle_between_matches_values_worked_out_by_hand() -> None:
    a = torch.tensor([[1.0, 0], [1, 0], [1, 0], [1, 0], [1, 0]])
    b = torch.tensor([[3.0, 0], [0, 2], [-1, 0], [1, 1], [1, 1e-6]])
    expected = torch.tensor([0.0, 90, 180, 45, math.degrees(1e-6)], dtype=torch.float64)
    assert torch.allclose(angle_between(a, b), expected, rtol=1e-6, atol=1e-12)


def test_inter_class_angles_are_those_between_the_class_means() -> None:
    z_ND = torch.tensor([[1.0, 0.1], [1, -0.1], [0, 2], [-3, 0]])
    labels = torch.tensor([0, 0, 4, 7])
    assert inter_class_angles(z_ND, labels).tolist() == pytest.approx([90, 180, 90])


def test_the_angles_of_two_models_match_values_worked_out_by_hand() -> None:
    local = torch.tensor([[1.0, 0], [1, 0], [0, 1], [0, 1]])
    whole = torch.tensor([[1.0, 0], [0, 3], [0, 1], [-1, 0]])
    angles = compare_embeddings(local, whole, torch.tensor([0, 0, 5, 5]))
    assert angles.local_global == pytest.approx(45)
    assert angles.by_class == pytest.approx({0: 45, 5: 45})
    assert angles.inter_class_local == pytest.approx(90)
    # The means are (1/2, 3/2) and (-1/2, 1/2).
    cosine = (-0.25 + 0.75) / math.sqrt(2.5 * 0.5)
    assert angles.inter_class_global == pytest.approx(math.degrees(math.acos(cosine)))
    alone = compare_embeddings(local, whole, torch.zeros(4, dtype=torch.int64))
    assert math.isnan(alone.inter_class_local)
