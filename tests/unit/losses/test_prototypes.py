"""ProtoCL's losses compared with hand calculations and plain loops."""

import math

import numpy as np
import pytest
import torch

from fedssl.losses import info_nce, prototype_concentrations, prototype_contrast
from support.tensors import standard_normal


def test_prototype_contrast_matches_hand_calculations() -> None:
    prototypes, concentrations = torch.eye(2), torch.tensor([1.0, 0.5])
    # Logits 1/1 and 0/0.5: log(1 + e^-1).
    value = prototype_contrast(torch.tensor([[3.0, 0.0]]), prototypes, torch.tensor([0]), concentrations)
    assert float(value) == pytest.approx(0.3132616875182228, rel=1e-6)
    # At 45 degrees the logits are 0.7071/1 and 0.7071/0.5: the tighter second prototype wins, log(1 + e^-0.7071).
    value = prototype_contrast(torch.tensor([[2.0, 2.0]]), prototypes, torch.tensor([1]), concentrations)
    assert float(value) == pytest.approx(0.40083352647070236, rel=1e-6)


@pytest.mark.parametrize("seed", range(3))
def test_prototype_contrast_equals_its_equation(seed: int) -> None:
    query, prototypes = standard_normal(5, 4, seed=seed), standard_normal(6, 4, seed=seed + 10)
    phi = standard_normal(6, seed=seed + 20).abs() + 0.05
    clusters = [0, 3, 5, 3, 1]
    total = 0.0
    for q, s in zip(query, clusters, strict=True):
        weights = [math.exp(float(torch.cosine_similarity(q, c, dim=0)) / float(f)) for c, f in zip(prototypes, phi)]  # noqa: B905
        total -= math.log(weights[s] / sum(weights))
    value = prototype_contrast(query, prototypes, torch.tensor(clusters), phi)
    assert float(value) == pytest.approx(total / 5, rel=1e-10)


def test_prototype_contrast_with_equal_concentrations_is_info_nce() -> None:
    query, prototypes = standard_normal(1, 4, seed=0), standard_normal(6, 4, seed=1)
    contrast = prototype_contrast(query, prototypes, torch.tensor([2]), torch.full((6,), 0.1))
    others = prototypes[[0, 1, 3, 4, 5]]
    torch.testing.assert_close(contrast, info_nce(query, prototypes[2:3], others, 0.1), rtol=1e-6, atol=0)


def test_the_order_of_prototypes_does_not_matter() -> None:
    query, prototypes, phi = standard_normal(5, 4, seed=0), standard_normal(3, 4, seed=1), torch.tensor([0.1, 0.2, 0.3])
    clusters = torch.tensor([0, 1, 2, 0, 1])
    value = prototype_contrast(query, prototypes, clusters, phi)
    flipped = prototype_contrast(query, prototypes.flip(0), 2 - clusters, phi.flip(0))
    torch.testing.assert_close(value, flipped, rtol=1e-12, atol=0)


def test_concentrations_match_a_hand_calculation() -> None:
    # Unit embeddings and given prototypes. Cluster 0: distances 0 and sqrt(2), mean 0.7071, over log 12 = 2.4849:
    # 0.28456. Cluster 1: distances 0 and 0: 0. Cluster 2 has a single member: the largest, 0.28456.
    # Percentiles of (0, x, x) by linear interpolation: 10% is 0.2x, 90% is x. So (x, 0.2x, x), of mean 2.2x/3, scaled
    # to a mean of 0.1.
    z = torch.tensor([[2.0, 0.0], [0.0, 2.0], [-1.0, 0.0], [-3.0, 0.0], [0.0, -1.0]])
    prototypes = torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, 1.0]])
    phi = prototype_concentrations(z, prototypes, torch.tensor([0, 0, 1, 1, 2]), 0.1)
    torch.testing.assert_close(phi, torch.tensor([0.3, 0.06, 0.3]) / 2.2)


@pytest.mark.parametrize("seed", range(3))
def test_concentrations_equal_their_equation(seed: int) -> None:
    z, prototypes = (
        standard_normal(40, 4, seed=seed),
        torch.nn.functional.normalize(standard_normal(7, 4, seed=seed + 10)),
    )
    clusters = torch.randint(0, 6, (40,), generator=torch.Generator().manual_seed(seed))
    clusters[clusters == 5] = 4
    clusters[0] = 5  # a cluster of one; the seventh is empty
    units = [row / np.linalg.norm(row) for row in z.numpy()]
    density = np.zeros(7)
    for c in range(7):
        distances = [np.linalg.norm(u - prototypes[c].numpy()) for u, s in zip(units, clusters, strict=True) if s == c]
        if len(distances) > 1:
            density[c] = np.mean(distances) / np.log(len(distances) + 10)
    density[5] = density[6] = density.max()
    density = density.clip(np.percentile(density, 10), np.percentile(density, 90))
    density = 0.2 * density / density.mean()
    phi = prototype_concentrations(z, prototypes, clusters, 0.2)
    assert phi.numpy() == pytest.approx(density, rel=1e-12)
    assert float(phi.mean()) == pytest.approx(0.2, rel=1e-12)


def test_clusters_of_coinciding_members_keep_a_positive_concentration() -> None:
    z, prototypes = torch.eye(4), torch.eye(4)
    # Every distance is 0: no cluster is tighter than another.
    same = prototype_concentrations(z, prototypes, torch.arange(4), 0.1)
    torch.testing.assert_close(same, torch.full((4,), 0.1))
    # Most distances are 0: the clip leaves zeros, which are raised to a thousandth of the temperature.
    doubled = torch.cat([z, z])
    doubled[7] = torch.tensor([0.0, 0.0, 1.0, 1.0])
    phi = prototype_concentrations(doubled, prototypes, torch.arange(4).repeat(2), 0.1)
    assert phi[:3].tolist() == pytest.approx([1e-4] * 3, rel=1e-5)
    loss = prototype_contrast(doubled.requires_grad_(), prototypes, torch.arange(4).repeat(2), phi)
    loss.backward()
    assert doubled.grad is not None
    assert doubled.grad.isfinite().all()


def test_inputs_that_do_not_fit_are_refused() -> None:
    z = torch.eye(2)
    with pytest.raises(ValueError, match="assignments_B must have shape"):
        prototype_contrast(z, z, torch.tensor([0]), torch.ones(2))
    with pytest.raises(ValueError, match="concentrations_M must have shape"):
        prototype_contrast(z, z, torch.tensor([0, 1]), torch.ones(3))
    with pytest.raises(ValueError, match="assignments_N must have shape"):
        prototype_concentrations(z, z, torch.tensor([0]), 0.1)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_concentrations_are_in_at_least_single_precision_and_have_no_gradient(dtype: torch.dtype) -> None:
    z, prototypes, clusters = (
        standard_normal(9, 4, seed=0).to(dtype),
        standard_normal(3, 4, seed=1).to(dtype),
        torch.arange(9) % 3,
    )
    phi = prototype_concentrations(z.requires_grad_(), prototypes, clusters, 0.1)
    assert phi.dtype == torch.promote_types(dtype, torch.float32)
    assert not phi.requires_grad
    exact = prototype_concentrations(z.detach().double(), prototypes.double(), clusters, 0.1)
    torch.testing.assert_close(phi.double(), exact, rtol=1e-5, atol=0)
