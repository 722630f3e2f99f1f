"""Losses over soft assignments compared with hand calculations and plain loops."""

import math

import numpy as np
import pytest
import torch

from fedssl.losses import (
    assignment_divergence,
    cluster_assignment,
    crossed_kl,
    student_t_assignment,
    target_distribution,
)
from support.tensors import standard_normal


def soft(rows: int, columns: int, seed: int) -> torch.Tensor:
    return torch.softmax(standard_normal(rows, columns, seed=seed), dim=1)


def kl(p: np.ndarray, q: np.ndarray) -> float:
    return sum(x * math.log(x / y) for x, y in zip(p, q, strict=True))


def loop_target(q: np.ndarray) -> np.ndarray:
    weights = np.array([[q[i, m] ** 2 / sum(q[:, m]) for m in range(q.shape[1])] for i in range(q.shape[0])])
    return np.array([row / sum(row) for row in weights])


def test_student_t_matches_a_hand_calculation() -> None:
    z, centers = torch.zeros(1, 2), torch.tensor([[0.0, 0.0], [1.0, 1.0], [0.0, 3.0**0.5]])
    # 1 + d^2 is 1, 3, 4: to the power -1/2 that is 1, 0.5774, 0.5, in all 2.0774; to the power -1: 12, 4, 3 of 19.
    expected = torch.tensor([[1.0, 3**-0.5, 0.5]]) / 2.0773502691896257
    torch.testing.assert_close(student_t_assignment(z, centers), expected)
    torch.testing.assert_close(student_t_assignment(z, centers, -1.0), torch.tensor([[12.0, 4.0, 3.0]]) / 19)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("exponent", [-0.5, -1.0])
def test_student_t_equals_its_equation(seed: int, exponent: float) -> None:
    z, centers = standard_normal(5, 4, seed=seed), standard_normal(3, 4, seed=seed + 10)
    q = student_t_assignment(z, centers, exponent).numpy()
    for i in range(5):
        weights = [(1 + sum((z[i].numpy() - c) ** 2)) ** exponent for c in centers.numpy()]
        assert q[i] == pytest.approx(np.array(weights) / sum(weights), rel=1e-10)


def test_student_t_ignores_the_origin_and_orders_centers_alike_for_every_exponent() -> None:
    z, centers = standard_normal(5, 4, seed=0), standard_normal(3, 4, seed=1)
    q = student_t_assignment(z, centers)
    torch.testing.assert_close(student_t_assignment(z + 100, centers + 100), q)
    torch.testing.assert_close(student_t_assignment(z, centers.flip(0)), q.flip(1))
    assert torch.equal(student_t_assignment(z, centers, -1.0).argsort(dim=1), q.argsort(dim=1))
    # Single precision far from the origin: the distances must not be lost in rounding errors of the lengths.
    far = student_t_assignment((z + 1000).float(), (centers + 1000).float())
    torch.testing.assert_close(far.double(), q, rtol=1e-3, atol=0)


def test_student_t_has_a_zero_gradient_on_a_center_and_refuses_a_positive_exponent() -> None:
    z = torch.zeros(2, 3, requires_grad=True)
    centers = torch.zeros(2, 3, requires_grad=True)
    student_t_assignment(z, centers).square().sum().backward()
    assert z.grad is not None
    assert centers.grad is not None
    assert z.grad.abs().max() == 0
    assert centers.grad.abs().max() == 0
    with pytest.raises(ValueError, match="exponent must be negative"):
        student_t_assignment(z, centers, 0.5)


def test_target_distribution_matches_a_hand_calculation() -> None:
    # Columns sum to 0.8, 1.2. Row 1: 0.36/0.8 = 0.45 to 0.16/1.2 = 0.1333; row 2: 0.04/0.8 = 0.05 to 0.64/1.2 = 0.5333.
    q = torch.tensor([[0.6, 0.4], [0.2, 0.8]])
    expected = torch.tensor([[0.7714285714, 0.2285714286], [0.0857142857, 0.9142857143]])
    torch.testing.assert_close(target_distribution(q), expected)


@pytest.mark.parametrize("seed", range(3))
def test_target_distribution_equals_its_equation(seed: int) -> None:
    q = soft(6, 4, seed)
    assert target_distribution(q).numpy() == pytest.approx(loop_target(q.numpy()), rel=1e-12)


def test_target_distribution_keeps_uniform_and_hard_rows_and_has_no_gradient() -> None:
    assert torch.equal(target_distribution(torch.full((4, 2), 0.5)), torch.full((4, 2), 0.5))
    assert torch.equal(target_distribution(torch.eye(3)), torch.eye(3))
    # A cluster without members, and rows of zeros, stay 0 without a NaN.
    unused = torch.tensor([[1.0, 0.0], [0.0, 0.0]])
    assert torch.equal(target_distribution(unused), unused)
    assert not target_distribution(soft(3, 2, 0).requires_grad_()).requires_grad


def test_assignment_divergence_matches_a_hand_calculation() -> None:
    p, q = torch.tensor([[1.0, 0.0], [0.5, 0.5]]), torch.tensor([[0.5, 0.5], [0.5, 0.5]])
    assert float(assignment_divergence(p, q)) == pytest.approx(math.log(2) / 2, rel=1e-6)


@pytest.mark.parametrize("seed", range(3))
def test_assignment_divergence_equals_its_equation(seed: int) -> None:
    p, q = soft(6, 4, seed), soft(6, 4, seed + 10)
    expected = np.mean([kl(a, b) for a, b in zip(p.numpy(), q.numpy(), strict=True)])
    assert float(assignment_divergence(p, q)) == pytest.approx(expected, rel=1e-12)
    assert float(assignment_divergence(p, p)) == 0.0


def test_zeros_give_finite_values_and_gradients() -> None:
    p, q = torch.eye(2, requires_grad=True), torch.eye(2).flip(0).requires_grad_()
    value = assignment_divergence(p, q)
    value.backward()
    assert value.isfinite()
    assert p.grad is not None
    assert q.grad is not None
    assert p.grad.isfinite().all()
    assert q.grad.isfinite().all()


def test_crossed_kl_matches_a_hand_calculation() -> None:
    online_a, target_b = torch.tensor([[0.75, 0.25], [0.25, 0.75]]), torch.tensor([[0.6, 0.4], [0.6, 0.4]])
    # Row 2 disagrees (1 against 0) and counts as 0. Equal rows keep their distribution: pT = 0.36/1.2 to 0.16/0.8 = 0.3
    # to 0.2 = (0.6, 0.4). KL = 0.6 log(0.6/0.75) + 0.4 log(0.4/0.25) = -0.1339 + 0.1880 = 0.0541, over 2 rows. In the
    # other direction a tie counts as 0, but the target is 1, so nothing is kept.
    online_b, target_a = torch.full((2, 2), 0.5), torch.tensor([[0.4, 0.6], [0.4, 0.6]])
    value = crossed_kl(online_a, online_b, target_a, target_b)
    assert float(value) == pytest.approx(0.027057660454884225, rel=1e-5)


@pytest.mark.parametrize("seed", range(5))
def test_crossed_kl_equals_its_equation(seed: int) -> None:
    q = [soft(8, 3, seed + 10 * k) for k in range(4)]
    online_a, online_b, target_a, target_b = (x.numpy() for x in q)
    total, kept = 0.0, 0
    for online, target in ((online_a, target_b), (online_b, target_a)):
        p = loop_target(target)
        for i in range(8):
            if max(range(3), key=lambda m: online[i, m]) == max(range(3), key=lambda m: target[i, m]):
                total += kl(p[i], online[i])
                kept += 1
    assert 0 < kept < 16
    assert float(crossed_kl(*q)) == pytest.approx(total / 8, rel=1e-12)


def test_crossed_kl_is_symmetric_in_the_views_and_trains_both() -> None:
    a, b, c, d = (soft(8, 3, seed) for seed in range(4))
    torch.testing.assert_close(crossed_kl(a, b, c, d), crossed_kl(b, a, d, c), rtol=1e-12, atol=0)
    online_a, online_b = a.clone().requires_grad_(), b.clone().requires_grad_()
    crossed_kl(online_a, online_b, c, d).backward()
    assert online_a.grad is not None
    assert online_b.grad is not None
    # Rows whose labels disagree get no gradient, the others do.
    agree = d.argmax(dim=1) == a.argmax(dim=1)
    assert torch.equal(online_a.grad.abs().sum(dim=1) > 0, agree)


def test_crossed_kl_has_a_gradient_for_the_centers() -> None:
    z, centers = standard_normal(8, 4, seed=0), standard_normal(3, 4, seed=1).requires_grad_()
    online = student_t_assignment(z, centers)
    target = student_t_assignment(z, centers.detach() * 1.1)
    (gradient,) = torch.autograd.grad(crossed_kl(online, online, target, target), centers)
    assert gradient.abs().max() > 0


def test_cluster_assignment_matches_a_hand_calculation() -> None:
    online, target = torch.tensor([[2.0, 0.0]]), torch.tensor([[0.0, 3.0]])
    # Target (0.2689, 0.7311), log prediction (-0.3133, -1.3133): 0.2689 * 0.3133 + 0.7311 * 1.3133 = 0.0842 + 0.9601.
    assert float(cluster_assignment(online, target, torch.eye(2), 1.0)) == pytest.approx(1.0443202661482278, rel=1e-6)


@pytest.mark.parametrize("seed", range(3))
def test_cluster_assignment_equals_its_equation(seed: int) -> None:
    online, target, centroids = (
        standard_normal(5, 4, seed=seed),
        standard_normal(5, 4, seed=seed + 10),
        standard_normal(6, 4, seed=seed + 20),
    )
    total = 0.0
    for o, t in zip(online.numpy(), target.numpy(), strict=True):
        o, t = o / np.linalg.norm(o), t / np.linalg.norm(t)
        prediction = np.exp([o @ c / 0.1 for c in centroids.numpy()])
        wanted = np.exp([t @ c / 0.1 for c in centroids.numpy()])
        total -= sum(wanted / sum(wanted) * np.log(prediction / sum(prediction)))
    assert float(cluster_assignment(online, target, centroids)) == pytest.approx(total / 5, rel=1e-10)


def test_the_order_of_centroids_does_not_matter() -> None:
    online, target, centroids = (
        standard_normal(5, 4, seed=0),
        standard_normal(5, 4, seed=1),
        standard_normal(6, 4, seed=2),
    )
    value = cluster_assignment(online, target, centroids)
    torch.testing.assert_close(cluster_assignment(online, target, centroids.flip(0)), value, rtol=1e-12, atol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_target_distribution_is_computed_in_at_least_single_precision(dtype: torch.dtype) -> None:
    q = soft(6, 4, 0).to(dtype)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        p = target_distribution(q)
    assert p.dtype == torch.promote_types(dtype, torch.float32)
    torch.testing.assert_close(p.double(), target_distribution(q.double()), rtol=1e-5, atol=0)
