"""Clustering on the sphere: planted clusters, plain loops as a reference, balance, and the source of randomness."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from fedssl.aggregation import (
    AggregationError,
    Clustering,
    balanced_kmeans,
    global_centroids,
    sinkhorn_assignment,
    spherical_kmeans,
)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def planted(sizes: list[int], width: int = 16, noise: float = 0.05, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return embeddings of random lengths around orthogonal directions, and the index of each embedding's direction."""
    labels = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    points = torch.eye(width)[labels] + noise * torch.randn(len(labels), width, generator=generator(seed))
    order = torch.randperm(len(labels), generator=generator(seed + 1))
    lengths = torch.rand(len(labels), 1, generator=generator(seed + 2)) * 5 + 0.1
    return (points * lengths)[order], labels[order]


def same_partition(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a[:, None] == a, b[:, None] == b)


def test_spherical_kmeans_matches_a_hand_calculation() -> None:
    # Two pairs of directions, of any lengths: the centroids are the normalised sums of the unit vectors.
    z = torch.tensor([[9.0, 0.0], [0.6, 0.8], [0.0, -1.0], [0.0, -2.0]])
    result = spherical_kmeans(z, 2, generator=generator(), num_iterations=5)
    assert isinstance(result, Clustering)
    first = result.assignments[0]
    assert result.assignments.tolist() == [first, first, 1 - first, 1 - first]
    # (1, 0) + (0.6, 0.8) = (1.6, 0.8), of length 1.7889.
    assert result.centroids[first].tolist() == pytest.approx([0.894427191, 0.4472135955], rel=1e-6)
    assert result.centroids[1 - first].tolist() == pytest.approx([0.0, -1.0])


@pytest.mark.parametrize("seed", range(5))
def test_spherical_kmeans_reaches_a_fixed_point_of_its_equations(seed: int) -> None:
    z = torch.randn(200, 6, generator=generator(seed), dtype=torch.float64)
    centroids, assignments = spherical_kmeans(z, 5, generator=generator(seed), num_iterations=100)
    units = [row / np.linalg.norm(row) for row in z.numpy()]
    for unit, cluster in zip(units, assignments, strict=True):
        assert int(np.argmax([unit @ c for c in centroids.numpy()])) == int(cluster)
    for m in range(5):
        total = sum(unit for unit, cluster in zip(units, assignments, strict=True) if cluster == m)
        assert centroids[m].numpy() == pytest.approx(total / np.linalg.norm(total), rel=1e-9)


@pytest.mark.parametrize("num_clusters", [7, 40])
def test_spherical_kmeans_takes_the_steps_of_its_equations(num_clusters: int) -> None:
    """Three steps in plain float64, from the same samples."""
    z = torch.randn(60, 3, generator=generator(1), dtype=torch.float64)
    found = spherical_kmeans(z, num_clusters, generator=generator(2), num_iterations=3)
    unit = z.numpy() / np.linalg.norm(z.numpy(), axis=1, keepdims=True)
    centroids = unit[torch.randperm(60, generator=generator(2))[:num_clusters].numpy()]
    for _ in range(3):
        nearest = (unit @ centroids.T).argmax(axis=1)
        assert set(nearest) == set(range(num_clusters)), "no cluster is empty"
        sums = np.array([unit[nearest == m].sum(axis=0) for m in range(num_clusters)])
        centroids = sums / np.linalg.norm(sums, axis=1, keepdims=True)
    np.testing.assert_allclose(found.centroids.numpy(), centroids, atol=1e-12)
    assert found.assignments.tolist() == (unit @ centroids.T).argmax(axis=1).tolist()


def test_spherical_kmeans_finds_planted_clusters_of_unequal_size() -> None:
    found = 0
    for seed in range(10):
        z, labels = planted([5, 20, 60], seed=seed)
        found += same_partition(spherical_kmeans(z, 3, generator=generator(seed)).assignments, labels)
    assert found >= 5  # a random start may put two centroids into one cluster


def test_an_empty_cluster_restarts_at_the_worst_fitting_sample() -> None:
    # Three samples coincide. If two centroids start there, one of them is empty and the other has exactly these three.
    # The two remaining samples share the third centroid until the one that fits worse gets the empty cluster.
    z = torch.tensor([[1.0, 0.0, 0.0]] * 3 + [[0.0, 1.0, 0.0], [0.0, 0.5, 0.9]])
    for seed in range(10):
        assignments = spherical_kmeans(z, 3, generator=generator(seed)).assignments
        assert same_partition(assignments, torch.tensor([0, 0, 0, 1, 2]))


def test_members_that_cancel_out_leave_their_centroid_unchanged() -> None:
    z = torch.tensor([[1.0, 0.0], [-1.0, 0.0]])
    centroids, _ = spherical_kmeans(z, 1, generator=generator(), num_iterations=3)
    assert centroids[0].norm() == 1.0


def test_balanced_kmeans_keeps_planted_clusters_of_equal_size() -> None:
    found = 0
    for seed in range(10):
        z, labels = planted([8, 8, 8, 8], seed=seed)
        result = balanced_kmeans(z, 4, generator=generator(seed), num_iterations=20)
        found += same_partition(result.assignments, labels)
        torch.testing.assert_close(result.centroids.norm(dim=1), torch.ones(4))
    assert found >= 5


def test_balanced_kmeans_splits_a_cluster_that_is_too_large() -> None:
    # 28 samples of one direction and 4 of another: clusters of 8 each.
    z, _ = planted([28, 4], noise=0.3)
    sizes = balanced_kmeans(z, 4, generator=generator()).assignments.bincount(minlength=4)
    assert int(sizes.min()) >= 6
    assert int(sizes.max()) <= 10


@pytest.mark.parametrize("seed", range(3))
def test_sinkhorn_matches_alternating_normalisation(seed: int) -> None:
    scores = torch.rand(12, 3, generator=generator(seed), dtype=torch.float64)
    plan = np.exp(25 * scores.numpy())
    for _ in range(2000):
        plan = plan / plan.sum(axis=0) * 4  # columns of 12/3
        plan = plan / plan.sum(axis=1, keepdims=True)
    ours = sinkhorn_assignment(scores, num_iterations=2000, tolerance=0.0)
    assert ours.numpy() == pytest.approx(plan, rel=1e-6, abs=1e-9)


def test_sinkhorn_matches_a_hand_calculation() -> None:
    # Symmetric scores are already balanced: the plan is the softmax of (25, 0), and of (0, 0).
    plan = sinkhorn_assignment(torch.tensor([[1.0, 0.0], [0.0, 1.0]]), sharpness=1.0)
    torch.testing.assert_close(plan, torch.tensor([[0.7310585786, 0.2689414214], [0.2689414214, 0.7310585786]]))
    assert torch.equal(sinkhorn_assignment(torch.zeros(4, 2)), torch.full((4, 2), 0.5))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_sinkhorn_rows_sum_to_one_and_columns_to_the_equal_size(dtype: torch.dtype) -> None:
    scores = torch.rand(40, 5, generator=generator(), dtype=torch.float64).to(dtype).requires_grad_()
    plan = sinkhorn_assignment(scores, tolerance=1e-6, num_iterations=1000)
    assert plan.dtype == torch.promote_types(dtype, torch.float32)
    assert not plan.requires_grad
    torch.testing.assert_close(plan.sum(dim=1), torch.ones_like(plan[:, 0]), rtol=1e-6, atol=0)
    torch.testing.assert_close(plan.sum(dim=0), torch.full_like(plan[0], 8.0), rtol=1e-5, atol=0)
    hard = sinkhorn_assignment(scores * 1000)  # one-hot except for the balance: no division by an underflow
    assert hard.isfinite().all()


def test_sinkhorn_stops_once_it_has_converged() -> None:
    scores = torch.rand(40, 5, generator=generator(), dtype=torch.float64)
    eleven, hundred = (sinkhorn_assignment(scores, 5.0, count, tolerance=0.0) for count in (11, 100))
    assert not torch.equal(eleven, hundred)
    assert torch.equal(
        sinkhorn_assignment(scores, 5.0), eleven
    )  # it checks the first iteration and every tenth after it


def test_global_centroids_find_planted_clusters() -> None:
    z, labels = planted([10, 10, 10, 10], seed=3)
    centroids = global_centroids(z, 4, generator=generator(1))
    assert same_partition((z @ centroids.T).argmax(dim=1), labels)
    torch.testing.assert_close(centroids.norm(dim=1), torch.ones(4))


def test_global_centroids_take_the_same_steps_as_torchs_sgd() -> None:
    z = torch.nn.functional.normalize(torch.randn(20, 6, generator=generator(), dtype=torch.float64))
    initial = torch.nn.functional.normalize(torch.randn(4, 6, generator=generator(1), dtype=torch.float64))
    weight = torch.nn.Parameter(initial.clone())
    optimizer = torch.optim.SGD([weight], lr=0.01, momentum=0.9, weight_decay=1e-4)
    for _ in range(7):
        target = sinkhorn_assignment((z @ weight.T).detach())
        prediction = torch.softmax(z @ weight.T / 0.1, dim=1)
        optimizer.zero_grad()
        (-torch.cosine_similarity(target, prediction, dim=1).mean()).backward()
        optimizer.step()
        with torch.no_grad():
            weight.copy_(torch.nn.functional.normalize(weight))
    ours = global_centroids(z, 4, generator=generator(), initial_MD=initial, num_steps=7)
    torch.testing.assert_close(ours, weight.detach(), rtol=1e-12, atol=1e-12)
    with torch.no_grad():
        assert torch.equal(global_centroids(z, 4, generator=generator(), initial_MD=initial, num_steps=7), ours)
    assert not ours.requires_grad


RANDOM: list[Callable[[Tensor, torch.Generator], Tensor]] = [
    lambda z, g: spherical_kmeans(z, 3, generator=g).centroids,
    lambda z, g: balanced_kmeans(z, 3, generator=g).centroids,
    lambda z, g: global_centroids(z, 3, generator=g, num_steps=3),
]


@pytest.mark.parametrize("cluster", RANDOM)
def test_all_randomness_comes_from_the_generator(cluster: Callable[[Tensor, torch.Generator], Tensor]) -> None:
    z = torch.randn(30, 4, generator=generator())
    state = torch.get_rng_state()
    first, second, other = (cluster(z, generator(seed)) for seed in (1, 1, 2))
    assert torch.equal(first, second)
    assert not torch.equal(first, other)
    assert torch.equal(torch.get_rng_state(), state)
    again = generator(1)
    cluster(z, again)
    assert not torch.equal(cluster(z, again), first)


@pytest.mark.parametrize("cluster", RANDOM)
def test_lengths_have_no_influence_and_the_input_is_not_modified(
    cluster: Callable[[Tensor, torch.Generator], Tensor],
) -> None:
    z = torch.randn(30, 4, generator=generator(), dtype=torch.float64)
    before = z.clone()
    lengths = torch.linspace(0.1, 9, 30, dtype=torch.float64)[:, None]
    torch.testing.assert_close(cluster(z * lengths, generator(1)), cluster(z, generator(1)), rtol=1e-9, atol=1e-9)
    assert torch.equal(z, before)
    assert cluster(z.half(), generator(1)).dtype == torch.float32


def test_too_few_samples_and_wrong_shapes_are_refused() -> None:
    z = torch.eye(2)
    for cluster in (spherical_kmeans, balanced_kmeans):
        for count in (0, 3):
            with pytest.raises(AggregationError, match=f"2 samples for {count} clusters"):
                cluster(z, count, generator=generator())
        with pytest.raises(AggregationError, match="must be a matrix"):
            cluster(torch.ones(3), 1, generator=generator())
    with pytest.raises(AggregationError, match="initial_MD must be of shape"):
        global_centroids(z, 3, generator=generator(), initial_MD=z)
    with pytest.raises(AggregationError, match="scores_NM must be a matrix"):
        sinkhorn_assignment(torch.ones(0, 3))
    # Fewer local centroids than global clusters are allowed: the server works with what the cohort sent.
    assert global_centroids(z, 5, generator=generator(), num_steps=1).shape == (5, 2)
