"""Decorrelation and the proximal term compared with hand calculations and plain loops."""

import math

import numpy as np
import pytest
import torch

from fedssl.losses import decorrelation, proximal


def features(batch: int = 8, width: int = 5, seed: int = 0) -> torch.Tensor:
    return torch.randn(batch, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_decorrelation_matches_hand_calculations() -> None:
    # Columns (1, 0, -1) and (2, 0, -2) correlate by 1. With the unbiased variance x^T x is 2 off the diagonal: 2^2/3.
    z = torch.tensor([[1.0, 2.0], [0.0, 0.0], [-1.0, -2.0]])
    assert float(decorrelation(z)) == pytest.approx(4 / 3, rel=1e-6)
    # The correlation matrix is all ones: 4 entries of 1 over 2^2.
    assert float(decorrelation(z, variant="paper")) == pytest.approx(1.0, rel=1e-6)
    # Columns (1, 0, -1) and (1, -2, 1) do not correlate: nothing off the diagonal; 2 ones over 2^2 on it.
    z = torch.tensor([[1.0, 1.0], [0.0, -2.0], [-1.0, 1.0]])
    assert float(decorrelation(z)) == pytest.approx(0.0, abs=1e-12)
    assert float(decorrelation(z, variant="paper")) == pytest.approx(0.5, rel=1e-6)


@pytest.mark.parametrize("seed", range(3))
def test_decorrelation_equals_its_equations(seed: int) -> None:
    z = features(seed=seed)
    columns = [z[:, m].numpy() for m in range(5)]
    standard = [(c - c.mean()) / np.sqrt(c.var(ddof=1) + 1e-8) for c in columns]
    reference = np.mean([float(standard[m] @ standard[n]) ** 2 for m in range(5) for n in range(5) if m != n]) / 8
    assert float(decorrelation(z)) == pytest.approx(reference, rel=1e-9)
    correlation = np.corrcoef(z.numpy(), rowvar=False)
    assert float(decorrelation(z, "paper")) == pytest.approx(np.sum(correlation**2) / 25, rel=1e-6)


def test_the_reference_is_101_times_the_paper_on_random_features() -> None:
    z = features(128, 512)
    assert float(decorrelation(z) / decorrelation(z, "paper")) == pytest.approx(101, abs=1)


@pytest.mark.parametrize("variant", ["reference", "paper"])
def test_decorrelation_ignores_the_scale_shift_and_order_of_features(variant: str) -> None:
    z = features()
    value = decorrelation(z, variant)
    changed = (z * torch.tensor([1.0, 2.0, 5.0, 0.5, 3.0]) + torch.arange(5.0))[:, [4, 2, 0, 1, 3]]
    torch.testing.assert_close(decorrelation(changed, variant), value, rtol=1e-6, atol=0)


@pytest.mark.parametrize("variant", ["reference", "paper"])
def test_constant_features_and_a_batch_of_one_have_neither_loss_nor_gradient(variant: str) -> None:
    z = torch.ones(4, 3, requires_grad=True)
    value = decorrelation(z, variant)
    value.backward()
    assert float(value.detach()) == 0.0
    assert z.grad is not None
    assert z.grad.abs().max() == 0
    single = torch.ones(1, 3, requires_grad=True)
    value = decorrelation(single, variant)
    value.backward()
    assert float(value.detach()) == 0.0
    assert single.grad is not None
    assert single.grad.abs().max() == 0
    with pytest.raises(ValueError, match="fewer than 2 features"):
        decorrelation(torch.ones(4, 1), variant)


def test_proximal_matches_a_hand_calculation() -> None:
    # (0.1/2) (3^2 + 4^2 + 2^2) = 0.05 * 29.
    live, reference = [torch.tensor([3.0, 4.0]), torch.tensor(1.0)], [torch.zeros(2), torch.tensor(-1.0)]
    assert float(proximal(live, reference, 0.1)) == pytest.approx(1.45, rel=1e-6)
    named = proximal({"a": live[0], "b": live[1]}, {"b": reference[1], "a": reference[0]}, 0.1)
    assert float(named) == pytest.approx(1.45, rel=1e-6)


@pytest.mark.parametrize("seed", range(3))
def test_proximal_equals_its_equation(seed: int) -> None:
    shapes = [(3, 2), (4,), (2, 1, 2)]
    generator = torch.Generator().manual_seed(seed)
    live = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    reference = [weight.flip(0) * 1.5 for weight in live]
    squares = sum(
        (float(w) - float(g)) ** 2
        for weight, origin in zip(live, reference, strict=True)
        for w, g in zip(weight.flatten(), origin.flatten(), strict=True)
    )
    assert float(proximal(live, reference, 0.3)) == pytest.approx(0.15 * squares, rel=1e-12)


def test_proximal_is_zero_at_the_start_and_positive_after_one_step() -> None:
    model = torch.nn.Linear(3, 2)
    reference = [parameter.detach().clone() for parameter in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    start = proximal(model.parameters(), reference, 0.01)
    (model(torch.ones(4, 3)).square().mean() + start).backward()
    assert float(start.detach()) == 0.0
    optimizer.step()
    assert float(proximal(model.parameters(), reference, 0.01).detach()) > 0


def test_proximal_has_a_gradient_for_the_parameters_but_not_for_the_reference() -> None:
    live, reference = torch.tensor([1.0, 2.0], requires_grad=True), torch.tensor([3.0, 0.0], requires_grad=True)
    proximal([live], [reference], 0.5).backward()
    assert live.grad is not None
    assert live.grad.tolist() == [-1.0, 1.0]  # mu (w - w_g)
    assert reference.grad is None


@pytest.mark.parametrize("mu", [-0.1, math.nan, math.inf])
def test_mu_must_be_finite_and_not_negative(mu: float) -> None:
    with pytest.raises(ValueError, match="mu must be"):
        proximal([torch.ones(1)], [torch.ones(1)], mu)
    assert float(proximal([torch.ones(1)], [torch.zeros(1)], 0.0)) == 0.0


def test_weights_that_do_not_match_are_refused() -> None:
    one, two = torch.ones(1), torch.ones(2)
    for live, reference in [([], []), ([one], [two]), ([one], [one, one])]:
        with pytest.raises(ValueError, match="shapes differ"):
            proximal(live, reference, 0.1)
    with pytest.raises(ValueError, match="names differ"):
        proximal({"a": one}, {"b": one}, 0.1)
    with pytest.raises(ValueError, match="both be mappings by name"):
        proximal({"a": one}, [one], 0.1)
