"""FedU2's regulariser compared with hand calculations and plain loops over tangent points."""

import math

import numpy as np
import pytest
import torch

from fedssl.losses import flexible_uniform_regularizer, tangent_sliced_wasserstein
from support.tensors import standard_normal

NORTH = torch.tensor([[[0.0, 1.0]]], dtype=torch.float64)
EAST = torch.tensor([[1.0, 0.0]], dtype=torch.float64)


def on_circle(*angles: float) -> torch.Tensor:
    return torch.tensor([[math.cos(angle), math.sin(angle)] for angle in angles], dtype=torch.float64)


def log_map(t: np.ndarray, x: np.ndarray) -> np.ndarray:
    along = float(np.clip(t @ x, -1, 1))
    sideways = x - along * t
    return math.acos(along) * sideways / np.linalg.norm(sideways)


def test_tangent_sliced_wasserstein_matches_hand_calculations() -> None:
    pi = math.pi
    # In the tangent line at east a point at angle a has coordinate a. One point: (pi/3 - (-pi/6))^2 = (pi/2)^2.
    value = tangent_sliced_wasserstein(on_circle(pi / 3), on_circle(-pi / 6), EAST, NORTH)
    assert float(value) == pytest.approx(2.4674011002723395, rel=1e-9)
    # Two points, sorted: (-pi/6, pi/3) against (pi/6, pi/2), so (pi^2/9 + pi^2/36)/2 = 5 pi^2/72.
    value = tangent_sliced_wasserstein(on_circle(pi / 3, -pi / 6), on_circle(pi / 6, pi / 2), EAST, NORTH)
    assert float(value) == pytest.approx(0.6853891945200944, rel=1e-9)
    # A projection twice as long counts four times.
    value = tangent_sliced_wasserstein(on_circle(pi / 3), on_circle(-pi / 6), EAST, 2 * NORTH)
    assert float(value) == pytest.approx(4 * 2.4674011002723395, rel=1e-9)


@pytest.mark.parametrize("seed", range(3))
def test_tangent_sliced_wasserstein_equals_its_equation(seed: int) -> None:
    z, samples, tangents = (
        standard_normal(6, 4, seed=seed),
        standard_normal(6, 4, seed=seed + 10),
        standard_normal(3, 4, seed=seed + 20),
    )
    projections = standard_normal(3, 5, 4, seed=seed + 30)
    squares = []
    for t, directions in zip(tangents.numpy(), projections.numpy(), strict=True):
        t = t / np.linalg.norm(t)
        maps = [[log_map(t, x / np.linalg.norm(x)) for x in points.numpy()] for points in (z, samples)]
        for w in directions:
            ours, theirs = (sorted(v @ w for v in points) for points in maps)
            squares += [(a - b) ** 2 for a, b in zip(ours, theirs, strict=True)]
    value = tangent_sliced_wasserstein(z, samples, tangents, projections)
    assert float(value) == pytest.approx(np.mean(squares), rel=1e-10)


def test_equal_points_in_any_order_have_distance_zero() -> None:
    z, tangents, projections = (
        standard_normal(6, 4, seed=0),
        standard_normal(3, 4, seed=1),
        standard_normal(3, 5, 4, seed=2),
    )
    assert float(tangent_sliced_wasserstein(z, 2 * z.flip(0), tangents, projections)) == pytest.approx(0, abs=1e-14)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_tangent_points_and_their_antipodes_have_finite_values_and_gradients(dtype: torch.dtype) -> None:
    z = torch.cat([EAST, -EAST, on_circle(1e-4, 1e-9)]).to(dtype).requires_grad_()
    samples = on_circle(0.1, 0.2, 0.3, 0.4).to(dtype)
    value = tangent_sliced_wasserstein(z, samples, EAST.to(dtype), NORTH.to(dtype))
    value.backward()
    assert value.isfinite()
    assert z.grad is not None
    assert z.grad.isfinite().all()


@pytest.mark.parametrize("angle", [1e-6, 1e-3, 0.04, 0.0447, 0.045, 0.1, 1.0, 3.0])
def test_small_and_large_angles_are_exact(angle: float) -> None:
    value = tangent_sliced_wasserstein(on_circle(angle), EAST, EAST, NORTH)
    assert float(value) == pytest.approx(angle**2, rel=1e-10)
    single = tangent_sliced_wasserstein(on_circle(angle).float(), EAST.float(), EAST.float(), NORTH.float())
    assert float(single) == pytest.approx(angle**2, rel=1e-4)


def test_the_regulariser_sums_over_as_many_tangent_points_as_samples() -> None:
    z = standard_normal(6, 4, seed=0)
    generator = torch.Generator().manual_seed(5)
    tangents, samples = (torch.randn(6, 4, generator=generator, dtype=torch.float64) for _ in range(2))
    projections = torch.randn(6, 3, 4, generator=generator, dtype=torch.float64)
    expected = 6 / 2.5 * tangent_sliced_wasserstein(z, samples, tangents, projections)
    value = flexible_uniform_regularizer(z, torch.Generator().manual_seed(5), num_projections=3, divisor=2.5)
    torch.testing.assert_close(value, expected, rtol=1e-12, atol=0)


def test_all_randomness_comes_from_the_generator() -> None:
    z = standard_normal(6, 4, seed=0)
    state = torch.get_rng_state()
    first, second = (flexible_uniform_regularizer(z, torch.Generator().manual_seed(5)) for _ in range(2))
    assert torch.equal(first, second)
    assert torch.equal(torch.get_rng_state(), state)
    generator = torch.Generator().manual_seed(5)
    flexible_uniform_regularizer(z, generator)
    assert not torch.equal(flexible_uniform_regularizer(z, generator), first)


def test_a_collapsed_batch_is_far_from_uniform() -> None:
    spread, collapsed = standard_normal(64, 8, seed=0), standard_normal(64, 8, seed=0) * 0.1 + 1
    near, far = (flexible_uniform_regularizer(z, torch.Generator().manual_seed(1)) for z in (spread, collapsed))
    assert float(far) > 3 * float(near)


def test_inputs_that_do_not_fit_are_refused() -> None:
    z = torch.eye(2)
    with pytest.raises(ValueError, match="one batch size"):
        tangent_sliced_wasserstein(z, torch.ones(3, 2), z, torch.ones(2, 1, 2))
    for shape in [(2, 2), (1, 1, 2), (2, 1, 3), (2, 0, 2)]:
        with pytest.raises(ValueError, match="projections_JPD of shape"):
            tangent_sliced_wasserstein(z, z, z, torch.ones(*shape))
    with pytest.raises(ValueError, match="divisor must be positive"):
        flexible_uniform_regularizer(z, torch.Generator(), divisor=0)
