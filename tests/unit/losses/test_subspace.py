"""Dimension-scaled regularisation compared with hand calculations, plain loops and the published ratios."""

import numpy as np
import pytest
import torch

from fedssl.losses import dimension_scaled


def embeddings(batch: int = 6, width: int = 5, seed: int = 0) -> torch.Tensor:
    return torch.randn(batch, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def scale(width: int = 5, dimensions: int = 2, alpha: float = 10.0) -> torch.Tensor:
    factors = torch.ones(width, dtype=torch.float64)
    factors[:dimensions] = alpha
    return factors


def rotation(width: int = 5, seed: int = 9) -> torch.Tensor:
    return torch.linalg.qr(embeddings(width, width, seed)).Q


def test_dimension_scaled_matches_hand_calculations() -> None:
    z, factors = torch.tensor([[3.0, 4.0]]), torch.tensor([2.0, 1.0])
    # u = (0.6, 0.8), stretched (1.2, 0.8), of length sqrt(2.08): cosine 1.36/1.4422 = 0.9430, distance sqrt(2 - 1.886).
    assert float(dimension_scaled(z, factors)) == pytest.approx(0.3376674885656316, rel=1e-6)
    # Two equal rows: sqrt(2) times the distance over 2.
    assert float(dimension_scaled(z.expand(2, 2), factors)) == pytest.approx(0.3376674885656316 / 2**0.5, rel=1e-6)
    # The basis swapped: stretched (0.6, 1.6), of length sqrt(2.92): cosine 1.64/1.7088 = 0.9597.
    swapped = dimension_scaled(z, factors, torch.tensor([[0.0, 1.0], [1.0, 0.0]]))
    assert float(swapped) == pytest.approx(0.2837696001749638, rel=1e-6)
    # As printed, on (3, 4) against (6, 4): 9; on two rows, the other (0, 1) against itself: the mean 4.5.
    assert float(dimension_scaled(z, factors, variant="paper")) == 9.0
    assert float(dimension_scaled(torch.tensor([[3.0, 4.0], [0.0, 1.0]]), factors, variant="paper")) == 4.5


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("rotated", [False, True])
def test_dimension_scaled_equals_its_equations(seed: int, rotated: bool) -> None:  # noqa: FBT001
    z, d, q = embeddings(seed=seed), scale(), rotation() if rotated else None
    basis = np.eye(5) if q is None else q.numpy()
    stretch = sum(float(d[m]) * np.outer(basis[:, m], basis[:, m]) for m in range(5))
    squares, printed = 0.0, []
    for row in z.numpy():
        u = row / np.linalg.norm(row)
        t = u @ stretch / np.linalg.norm(u @ stretch)
        squares += np.sum((u - t) ** 2)
        printed.append(np.sum((row - row @ stretch) ** 2))
    assert float(dimension_scaled(z, d, q)) == pytest.approx(np.sqrt(squares) / 6, rel=1e-12)
    assert float(dimension_scaled(z, d, q, "paper")) == pytest.approx(np.mean(printed), rel=1e-12)


@pytest.mark.parametrize("variant", ["reference", "paper"])
def test_the_identity_as_rotation_is_plain_scaling_of_coordinates(variant: str) -> None:
    z, d = embeddings(), scale()
    rotated, plain = (dimension_scaled(z, d, q, variant) for q in (torch.eye(5, dtype=torch.float64), None))
    torch.testing.assert_close(rotated, plain, rtol=1e-14, atol=0)


@pytest.mark.parametrize("variant", ["reference", "paper"])
def test_rotating_basis_and_embeddings_together_changes_nothing(variant: str) -> None:
    z, d, q, turn = embeddings(), scale(), rotation(), rotation(seed=4)
    turned = dimension_scaled(z @ turn, d, turn.T @ q, variant)
    torch.testing.assert_close(turned, dimension_scaled(z, d, q, variant), rtol=1e-12, atol=0)


@pytest.mark.parametrize("variant", ["reference", "paper"])
def test_the_gradient_stops_at_the_stretched_copy(variant: str) -> None:
    z, d = embeddings().requires_grad_(), scale()
    (gradient,) = torch.autograd.grad(dimension_scaled(z, d, variant=variant), z)
    u = torch.nn.functional.normalize(z.detach(), dim=1)
    target = torch.nn.functional.normalize(u * d, dim=1)

    def with_fixed_target(rows: np.ndarray) -> float:
        if variant == "paper":
            return float(np.mean(np.sum((rows - (z.detach() * d).numpy()) ** 2, axis=1)))
        units = rows / np.linalg.norm(rows, axis=1, keepdims=True)
        return float(np.linalg.norm(units - target.numpy()) / len(rows))

    point, step = z.detach().numpy(), 1e-6
    for index in np.ndindex(*point.shape):
        nudge = np.zeros_like(point)
        nudge[index] = step
        slope = (with_fixed_target(point + nudge) - with_fixed_target(point - nudge)) / (2 * step)
        assert float(gradient[index]) == pytest.approx(slope, abs=1e-7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_scale_of_one_gives_neither_loss_nor_gradient(dtype: torch.dtype) -> None:
    z = embeddings(64, 128).to(dtype).requires_grad_()
    for q in (None, rotation(128).to(dtype)):
        value = dimension_scaled(z, torch.ones(128, dtype=dtype), q)
        (gradient,) = torch.autograd.grad(value, z)
        assert float(value.detach()) == 0.0
        assert gradient.abs().max() == 0


def test_gradients_relate_as_measured_on_random_unit_vectors() -> None:
    # 128 unit vectors of 512 dimensions, with 51 that are the client's own, at alpha 10: the reference's gradient is
    # 0.048 times that of the squared distance to the same target and, with respect to the unit vector, 0.016 times that
    # of Eq. 7.
    u = torch.nn.functional.normalize(embeddings(128, 512), dim=1).requires_grad_()
    d = scale(512, 51)
    target = torch.nn.functional.normalize((u * d).detach(), dim=1)
    (reference,) = torch.autograd.grad(dimension_scaled(u, d), u)
    squared_loss = (torch.nn.functional.normalize(u, dim=1) - target).square().sum(dim=1).mean()
    (squared,) = torch.autograd.grad(squared_loss, u)
    assert float(reference.norm() / squared.norm()) == pytest.approx(0.048, abs=5e-4)
    (paper,) = torch.autograd.grad(dimension_scaled(u, d, variant="paper"), u)
    (distance,) = torch.autograd.grad(torch.linalg.vector_norm(u - target) / 128, u)
    assert float(distance.norm() / paper.norm()) == pytest.approx(0.016, abs=5e-4)


def test_inputs_that_do_not_fit_are_refused() -> None:
    z = embeddings()
    with pytest.raises(ValueError, match="scale_D must have shape"):
        dimension_scaled(z, scale(4))
    with pytest.raises(ValueError, match="rotation_DD must have shape"):
        dimension_scaled(z, scale(), torch.eye(4))
    with pytest.raises(ValueError, match="unknown variant"):
        dimension_scaled(z, scale(), variant="squared")  # type: ignore[arg-type]
