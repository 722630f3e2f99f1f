"""Projector and similarity distillation compared with hand calculations and plain loops."""

import math

import numpy as np
import pytest
import torch

from fedssl.losses import projector_distillation, similarity_distillation


def pair(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    h, z = torch.randn(2, 6, 5, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return h, z


def softmax(row: np.ndarray) -> np.ndarray:
    return np.exp(row) / np.sum(np.exp(row))


def test_projector_distillation_matches_hand_calculations() -> None:
    h, z = torch.tensor([[0.0, 0.0]]), torch.tensor([[1.0, 0.0]])
    # softmax(z/0.5) = (0.8808, 0.1192), softmax(h/0.5) = (1/2, 1/2): log 2 less the entropy 0.3653.
    assert float(projector_distillation(h, z)) == pytest.approx(0.3278133254727379, rel=1e-6)
    # KL((1/2, 1/2) || (0.7311, 0.2689)) = (-0.3799 + 0.6201)/2.
    assert float(projector_distillation(h, z, variant="paper")) == pytest.approx(0.12011450695827758, rel=1e-6)
    # (1^2 + 0^2) / 2.
    assert float(projector_distillation(h, z, variant="mse")) == 0.5


@pytest.mark.parametrize("seed", range(3))
def test_projector_distillation_equals_its_equations(seed: int) -> None:
    h, z = pair(seed)
    reference, paper = [], []
    for row_h, row_z in zip(h.numpy(), z.numpy(), strict=True):
        p, q = softmax(row_z / 0.3), softmax(row_h / 0.3)
        reference.append(sum(p * np.log(p / q)))
        p, q = softmax(row_h), softmax(row_z)
        paper.append(sum(p * np.log(p / q)))
    assert float(projector_distillation(h, z, 0.3)) == pytest.approx(np.mean(reference), rel=1e-10)
    assert float(projector_distillation(h, z, 0.3, "paper")) == pytest.approx(np.mean(paper), rel=1e-10)
    squares = [(float(a) - float(b)) ** 2 for a, b in zip(h.flatten(), z.flatten(), strict=True)]
    assert float(projector_distillation(h, z, 0.3, "mse")) == pytest.approx(sum(squares) / 30, rel=1e-12)


@pytest.mark.parametrize("variant", ["reference", "paper"])
def test_adding_a_constant_to_a_row_changes_nothing_but_scaling_does(variant: str) -> None:
    h, z = pair(0)
    value = float(projector_distillation(h, z, variant=variant))
    assert float(projector_distillation(h + 3, z - 2, variant=variant)) == pytest.approx(value, rel=1e-10)
    assert abs(float(projector_distillation(2 * h, z, variant=variant)) - value) > 1e-3


def test_only_the_reference_variant_uses_the_temperature_and_at_one_the_paper_reverses_it() -> None:
    h, z = pair(0)
    for variant in ("paper", "mse"):
        assert torch.equal(projector_distillation(h, z, 0.1, variant), projector_distillation(h, z, 7.0, variant))
    reversed_at_one = float(projector_distillation(z, h, 1.0))
    assert float(projector_distillation(h, z, variant="paper")) == pytest.approx(reversed_at_one, rel=1e-12)


def test_projector_distillation_is_zero_for_equal_inputs_and_refuses_different_widths() -> None:
    h, _ = pair(0)
    for variant in ("reference", "paper", "mse"):
        assert float(projector_distillation(h, h, variant=variant)) == pytest.approx(0, abs=1e-15)
    with pytest.raises(ValueError, match="one width"):
        projector_distillation(torch.ones(2, 3), torch.ones(2, 4))
    with pytest.raises(ValueError, match="unknown variant"):
        projector_distillation(h, h, variant="kl")  # type: ignore[arg-type]


def test_similarity_distillation_matches_a_hand_calculation() -> None:
    student, keys, target = torch.tensor([[2.0, 0.0]]), torch.eye(2), torch.tensor([[0.5, 0.5]])
    # -[log 0.7311 + log 0.2689]/2 = (0.3133 + 1.3133)/2; less the target's entropy log 2 it is the divergence.
    assert float(similarity_distillation(student, keys, target, 1.0)) == pytest.approx(0.8132616875182228, rel=1e-6)
    paper = similarity_distillation(student, keys, target, 1.0, "paper")
    assert float(paper) == pytest.approx(0.8132616875182228 - math.log(2), rel=1e-6)


@pytest.mark.parametrize("seed", range(3))
def test_similarity_distillation_equals_its_equations(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    student = torch.randn(4, 5, generator=generator, dtype=torch.float64)
    keys = torch.randn(7, 5, generator=generator, dtype=torch.float64)
    target = torch.rand(4, 7, generator=generator, dtype=torch.float64)
    target = target / target.sum(dim=1, keepdim=True)
    cross_entropy, divergence = 0.0, 0.0
    for i in range(4):
        logits = np.array([float(torch.cosine_similarity(student[i], key, dim=0)) / 0.1 for key in keys])
        q, p = softmax(logits), target[i].numpy()
        cross_entropy -= sum(p * np.log(q)) / 4
        divergence += sum(p * np.log(p / q)) / 4
    assert float(similarity_distillation(student, keys, target)) == pytest.approx(cross_entropy, rel=1e-10)
    assert float(similarity_distillation(student, keys, target, variant="paper")) == pytest.approx(divergence, rel=1e-9)


def test_both_variants_of_similarity_distillation_have_the_same_gradient() -> None:
    generator = torch.Generator().manual_seed(0)
    student = torch.randn(4, 5, generator=generator, dtype=torch.float64, requires_grad=True)
    keys, target = torch.randn(7, 5, generator=generator, dtype=torch.float64), torch.full((4, 7), 1 / 7)
    gradients = [
        torch.autograd.grad(similarity_distillation(student, keys, target, variant=variant), student)[0]
        for variant in ("reference", "paper")
    ]
    torch.testing.assert_close(*gradients)


def test_targets_with_zeros_give_finite_losses_and_targets_of_another_shape_are_refused() -> None:
    student, keys = torch.eye(2, requires_grad=True), torch.eye(2)
    for variant in ("reference", "paper"):
        value = similarity_distillation(student, keys, torch.eye(2), variant=variant)
        assert value.isfinite()
    with pytest.raises(ValueError, match="does not fit 2 samples and 2 keys"):
        similarity_distillation(student, keys, torch.ones(2, 3))
