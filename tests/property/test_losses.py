"""Properties of the losses that hold for every batch."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedssl.losses import (
    alignment,
    assignment_divergence,
    byol_regression,
    dimension_scaled,
    nt_xent,
    projector_distillation,
    relational_divergence,
    student_t_assignment,
    target_distribution,
    uniformity,
)

quick = settings(max_examples=60, deadline=None)


@st.composite
def batches(draw: st.DrawFn, count: int = 2) -> list[Tensor]:
    """Draw some float32 batches of one shape, of any scale, with rows that may repeat or be zero."""
    shape = draw(st.integers(2, 6)), draw(st.integers(2, 5))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    drawn = torch.randn(count, *shape, generator=generator) * 10.0 ** draw(st.integers(-4, 4))
    if draw(st.booleans()):
        drawn[:, 0] = drawn[:, 1]
    if draw(st.booleans()):
        drawn[:, 0] = 0
    return list(drawn)


@quick
@given(batches())
def test_cosine_losses_stay_in_their_ranges(views: list[Tensor]) -> None:
    a, b = views
    assert -1e-6 <= float(alignment(a, b)) <= 4 + 1e-6
    assert -1e-6 <= float(byol_regression(a, b)) <= 4 + 1e-6
    assert -8 - 1e-5 <= float(uniformity(a)) <= 1e-6
    assert float(nt_xent(a, b, 0.5)) >= 0


@quick
@given(batches(3), st.floats(0.05, 2))
def test_relational_divergence_is_not_negative_and_zero_for_equal_views(
    views: list[Tensor], temperature: float
) -> None:
    a, b, references = views
    for variant in ("reference", "paper"):
        assert float(relational_divergence(a, b, references, temperature, variant)) >= -1e-5
        assert abs(float(relational_divergence(a, a, references, temperature, variant))) <= 1e-5


@quick
@given(batches(), st.floats(0.2, 2))
def test_divergences_of_softmaxes_are_not_negative(views: list[Tensor], temperature: float) -> None:
    h, z = views
    for variant in ("reference", "paper", "mse"):
        value = float(projector_distillation(h, z, temperature, variant))
        assert value >= -1e-5 * max(1.0, float(h.abs().max()), float(z.abs().max()))


@quick
@given(batches(2), st.sampled_from([-0.5, -1.0, -2.0]))
def test_assignments_and_targets_are_distributions(views: list[Tensor], exponent: float) -> None:
    z, centers = views
    q = student_t_assignment(z, centers, exponent)
    p = target_distribution(q)
    for rows in (q, p):
        assert (rows >= 0).all()
        torch.testing.assert_close(rows.sum(dim=1), torch.ones(len(rows)))
    assert float(assignment_divergence(p, q)) >= -1e-5


@quick
@given(batches(1), st.floats(0.1, 20), st.integers(1, 4))
def test_stretching_dimensions_costs_at_most_what_unit_vectors_can_differ(
    views: list[Tensor], alpha: float, owned: int
) -> None:
    (z,) = views
    scale = torch.ones(z.shape[1])
    scale[:owned] = alpha
    # With positive factors the angle stays below 90 degrees, so each distance is below sqrt(2).
    assert 0 <= float(dimension_scaled(z, scale)) <= (2 / len(z)) ** 0.5 + 1e-6
    q = torch.linalg.qr(torch.randn(z.shape[1], z.shape[1], generator=torch.Generator().manual_seed(0))).Q
    assert 0 <= float(dimension_scaled(z, scale, q)) <= (2 / len(z)) ** 0.5 + 1e-5
