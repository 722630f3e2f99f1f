"""Properties of the aggregation that hold for every cohort."""

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from torch import Tensor

from fedssl.aggregation import (
    ensemble_similarity,
    layerwise_divergence_aware,
    min_norm_weights,
    min_norm_weights_from_gram,
    sinkhorn_assignment,
    weighted_mean,
)

Update = dict[str, Tensor]
FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]

quick = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
weight = st.one_of(st.integers(1, 100_000), st.floats(1e-6, 1e6))
numbers = st.floats(-1e4, 1e4, width=32)


@st.composite
def cohorts(draw: st.DrawFn, dtypes: list[torch.dtype] = FLOATS) -> tuple[list[Update], list[float]]:
    """Draw the updates of 1 to 6 clients to one model, and their weights."""
    count = draw(st.integers(1, 6))
    shapes = draw(st.lists(arrays.array_shapes(min_dims=0, max_dims=3, max_side=3), min_size=1, max_size=3))
    kinds = [draw(st.sampled_from(dtypes)) for _ in shapes]
    updates = [
        {
            f"t{index}": torch.from_numpy(draw(arrays.arrays(np.float64, shape, elements=numbers))).to(kind)
            for index, (shape, kind) in enumerate(zip(shapes, kinds, strict=True))
        }
        for _ in range(count)
    ]
    return updates, draw(st.lists(weight, min_size=count, max_size=count))


def exact_mean(updates: list[Update], weights: list[float], name: str) -> np.ndarray:
    stacked = np.stack([update[name].double().numpy() for update in updates])
    return np.average(stacked, axis=0, weights=np.array(weights, dtype=np.float64))


def spacing(tensor: Tensor) -> np.ndarray:
    """Return the spacing of floats at each element, one to two units in the last place, in the tensor's dtype."""
    finfo = torch.finfo(tensor.dtype)
    return np.maximum(tensor.double().abs().numpy(), finfo.tiny) * finfo.eps


@quick
@given(cohorts())
def test_the_mean_is_numpys_float64_mean_rounded(cohort: tuple[list[Update], list[float]]) -> None:
    updates, weights = cohort
    mean = weighted_mean(updates, weights)
    assert list(mean) == sorted(updates[0])
    for name, tensor in mean.items():
        assert tensor.dtype == updates[0][name].dtype
        assert tensor.shape == updates[0][name].shape
        difference = np.abs(tensor.double().numpy() - exact_mean(updates, weights, name))
        assert (difference <= spacing(tensor) + 1e-10).all()


@quick
@given(cohorts(), st.randoms(use_true_random=False))
def test_the_order_of_the_updates_changes_only_the_rounding(cohort: tuple[list[Update], list[float]], random) -> None:
    updates, weights = cohort
    order = list(range(len(updates)))
    random.shuffle(order)
    mean = weighted_mean(updates, weights)
    shuffled = weighted_mean([updates[k] for k in order], [weights[k] for k in order])
    for name, tensor in mean.items():
        difference = np.abs(tensor.double().numpy() - shuffled[name].double().numpy())
        assert (difference <= spacing(tensor) + 1e-10).all()


@quick
@given(cohorts(), st.lists(weight, min_size=1, max_size=8))
def test_the_mean_of_equal_updates_has_their_bits(
    cohort: tuple[list[Update], list[float]], weights: list[float]
) -> None:
    update = cohort[0][0]
    mean = weighted_mean((update for _ in weights), weights)
    for name, tensor in update.items():
        assert torch.equal(mean[name], tensor)


@quick
@given(cohorts(), st.floats(1e-3, 1e3))
def test_only_the_ratios_of_the_weights_matter(cohort: tuple[list[Update], list[float]], factor: float) -> None:
    updates, weights = cohort
    mean, scaled = (weighted_mean(updates, [w * f for w in weights]) for f in (1.0, factor))
    for name, tensor in mean.items():
        difference = np.abs(tensor.double().numpy() - scaled[name].double().numpy())
        assert (difference <= spacing(tensor) + 1e-10).all()


@quick
@given(
    st.lists(st.tuples(st.lists(st.integers(-(2**40), 2**40), min_size=3, max_size=3), weight), min_size=1, max_size=6)
)
def test_the_mean_of_integers_is_an_integer_next_to_the_exact_mean(
    clients: list[tuple[list[int], float]],
) -> None:
    updates = [{"n": torch.tensor(values)} for values, _ in clients]
    weights = [w for _, w in clients]
    mean = weighted_mean(updates, weights)["n"]
    assert mean.dtype == torch.int64
    stacked = torch.stack([update["n"] for update in updates])
    assert (mean >= stacked.amin(dim=0)).all()
    assert (mean <= stacked.amax(dim=0)).all()
    assert (np.abs(mean.numpy() - exact_mean(updates, weights, "n")) <= 0.5 + 1e-2).all()


@quick
@given(cohorts())
def test_the_mean_lies_between_the_updates(cohort: tuple[list[Update], list[float]]) -> None:
    updates, weights = cohort
    for name, tensor in weighted_mean(updates, weights).items():
        stacked = torch.stack([update[name] for update in updates]).double()
        slack = torch.from_numpy(np.asarray(spacing(tensor)))
        assert (tensor.double() >= stacked.amin(dim=0) - slack).all()
        assert (tensor.double() <= stacked.amax(dim=0) + slack).all()


@quick
@given(cohorts([torch.float32, torch.float16, torch.bfloat16]), st.integers(1, 6))
def test_divergence_awareness_is_the_plain_mean_if_clients_equal_the_global_model(
    cohort: tuple[list[Update], list[float]], count: int
) -> None:
    previous = cohort[0][0]
    combined = layerwise_divergence_aware([previous] * count, previous)
    mean = weighted_mean([previous] * count, [1] * count)
    for name, tensor in previous.items():
        assert torch.equal(combined[name], mean[name])
        assert torch.equal(combined[name], tensor)


@quick
@given(cohorts([torch.float64]), cohorts([torch.float64]))
def test_divergence_awareness_never_lengthens_tensors_or_depends_on_the_order(
    cohort: tuple[list[Update], list[float]], other: tuple[list[Update], list[float]]
) -> None:
    updates, _ = cohort
    previous = {name: tensor.roll(1) if tensor.ndim else tensor for name, tensor in updates[0].items()}
    combined = layerwise_divergence_aware(iter(updates), previous)
    reverse = layerwise_divergence_aware(reversed(updates), previous)
    for name, tensor in combined.items():
        longest = max(float(update[name].norm()) for update in updates)
        assert float(tensor.norm()) <= longest * (1 + 1e-9) + 1e-9
        torch.testing.assert_close(tensor, reverse[name], rtol=1e-9, atol=1e-8)


gradients = arrays.arrays(
    np.float64, st.tuples(st.integers(1, 8), st.integers(1, 5)), elements=st.floats(-10, 10, width=16)
)


@settings(quick, max_examples=200)
@given(gradients)
def test_min_norm_weights_are_on_the_simplex_and_optimal(g: np.ndarray) -> None:
    weights = min_norm_weights(torch.from_numpy(g)).numpy()
    scale = max(float((g * g).sum(axis=1).max()), 1e-30)
    assert (weights >= 0).all()
    assert weights.sum() == pytest.approx(1, abs=1e-12)
    shortest = weights @ g
    # Karush-Kuhn-Tucker: no gradient's product with the point is below the point's square, and those in use equal it.
    products = g @ shortest
    assert (products >= shortest @ shortest - 1e-9 * scale).all()
    assert (np.abs(products - shortest @ shortest)[weights > 1e-6] <= 1e-5 * scale).all()


@settings(quick, max_examples=100)
@given(gradients, st.randoms(use_true_random=False), st.floats(0.01, 100))
def test_the_shortest_point_does_not_depend_on_the_order_or_the_scale(g: np.ndarray, random, factor: float) -> None:
    order = list(range(len(g)))
    random.shuffle(order)
    scale = max(float(np.abs(g).max()), 1e-15)
    points = [
        min_norm_weights(torch.from_numpy(variant)).numpy() @ variant / size
        for variant, size in ((g, 1.0), (np.ascontiguousarray(g[order]), 1.0), (factor * g, factor))
    ]
    gram = torch.from_numpy(g @ g.T)
    points.append(min_norm_weights_from_gram(gram).numpy() @ g)
    for point in points[1:]:
        assert point == pytest.approx(points[0], abs=2e-5 * scale)


@quick
@given(
    st.lists(st.integers(1, 4), min_size=1, max_size=4),
    st.integers(2, 8),
    st.floats(0.02, 10),
    st.integers(0, 2**32),
)
def test_target_rows_sum_to_one_for_any_widths_of_the_clients(
    widths: list[int], num_samples: int, temperature: float, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    clients = [torch.randn(num_samples, width, generator=generator) for width in widths]
    p = ensemble_similarity(clients, range(num_samples), range(num_samples), temperature)
    assert (p >= 0).all()
    torch.testing.assert_close(p.sum(dim=1), torch.ones(num_samples))
    # Another client that finds all samples alike keeps the order: the nearest sample stays the nearest.
    p_more = ensemble_similarity([*clients, torch.ones(num_samples, 1)], range(num_samples), range(num_samples), 1.0)
    p_less = ensemble_similarity(clients, range(num_samples), range(num_samples), 1.0)
    assert torch.equal(p_more.argmax(dim=1), p_less.argmax(dim=1))


@quick
@given(arrays.arrays(np.float64, st.tuples(st.integers(1, 9), st.integers(1, 4)), elements=st.floats(-1, 1)))
def test_sinkhorn_rows_sum_to_one_for_any_scores(scores: np.ndarray) -> None:
    plan = sinkhorn_assignment(torch.from_numpy(scores))
    assert (plan >= 0).all()
    torch.testing.assert_close(plan.sum(dim=1), torch.ones(len(scores), dtype=torch.float64), rtol=1e-9, atol=0)
