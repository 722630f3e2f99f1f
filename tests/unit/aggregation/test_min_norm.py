"""Min-norm weights and FedU2's aggregation, compared with closed forms, a quadratic programme and plain loops."""

import numpy as np
import pytest
import scipy.optimize
import torch
from torch import Tensor

from fedssl.aggregation import (
    AggregationError,
    efficient_unified_aggregation,
    min_norm_weights,
    min_norm_weights_from_gram,
    weighted_mean,
)
from fedssl.aggregation import min_norm as min_norm_module
from support.tensors import standard_normal


def test_weights_of_two_clients_match_a_hand_calculation() -> None:
    # (2, 0) and (0, 1): the foot of the perpendicular from the origin lies at g2.(g2-g1)/|g1-g2|^2 = 1/5 of the first.
    weights = min_norm_weights(torch.tensor([[2.0, 0.0], [0.0, 1.0]]))
    assert weights.dtype == torch.float32
    assert weights.tolist() == pytest.approx([0.2, 0.8], rel=1e-7)
    # (1, 0) and (3, 1): the segment leads away from the first, which is itself the shortest. The same in the other
    # order.
    assert min_norm_weights(torch.tensor([[1.0, 0.0], [3.0, 1.0]])).tolist() == [1.0, 0.0]
    assert min_norm_weights(torch.tensor([[3.0, 1.0], [1.0, 0.0]])).tolist() == [0.0, 1.0]
    # Opposite gradients cancel at 1/4 to 3/4.
    assert min_norm_weights(torch.tensor([[3.0], [-1.0]])).tolist() == [0.25, 0.75]


def test_weights_of_three_clients_match_hand_calculations() -> None:
    # The origin lies in the triangle: equal weights by symmetry.
    triangle = torch.tensor([[1.0, 0.0], [-0.5, 3**0.5 / 2], [-0.5, -(3**0.5) / 2]], dtype=torch.float64)
    assert min_norm_weights(triangle).tolist() == pytest.approx([1 / 3] * 3, rel=1e-12)
    # Orthogonal gradients are weighted by 1/|g|^2: 1, 1/4, 1/16 of 21/16.
    orthogonal = torch.diag(torch.tensor([1.0, 2.0, 4.0], dtype=torch.float64))
    assert min_norm_weights(orthogonal).tolist() == pytest.approx([16 / 21, 4 / 21, 1 / 21], rel=1e-12)
    # The third is far out and would only make the combination longer.
    assert min_norm_weights(torch.tensor([[1.0, 1.0], [1.0, -1.0], [9.0, 0.0]])).tolist() == pytest.approx(
        [0.5, 0.5, 0]
    )


def test_weights_of_two_clients_match_the_closed_form() -> None:
    for seed in range(50):
        a, b = standard_normal(2, 6, seed=seed)
        share = float(np.clip(float(b @ (b - a)) / float((a - b) @ (a - b)), 0, 1))
        assert min_norm_weights(torch.stack([a, b])).tolist() == pytest.approx([share, 1 - share], rel=1e-12, abs=1e-12)


@pytest.mark.parametrize("seed", range(12))
def test_the_norm_matches_a_quadratic_programme(seed: int) -> None:
    # Nonnegative least squares finds the point too: min |G^T w|^2 + (M (sum w - 1))^2 for a large M, then normalise.
    gradients = standard_normal(2 + seed % 6, 2 + seed % 4, seed=seed) + 0.3 * (seed % 3)
    large = 1e4
    system = np.vstack([gradients.numpy().T, large * np.ones(len(gradients))])
    goal = np.append(np.zeros(gradients.shape[1]), large)
    solution, _ = scipy.optimize.nnls(system, goal)
    best = np.linalg.norm(gradients.numpy().T @ (solution / solution.sum()))
    assert float((min_norm_weights(gradients) @ gradients).norm()) == pytest.approx(best, abs=1e-6)


def test_degenerate_sets_of_gradients_have_valid_weights() -> None:
    assert min_norm_weights(torch.ones(1, 3)).tolist() == [1.0]
    assert min_norm_weights(torch.zeros(4, 3)).tolist() == [0.25] * 4
    repeated = standard_normal(1, 5, seed=0).expand(6, 5)
    weights = min_norm_weights(repeated)
    assert float(weights.sum()) == pytest.approx(1)
    torch.testing.assert_close(weights @ repeated, repeated[0])
    # One client is at a stationary point: no step improves all clients.
    assert min_norm_weights(torch.tensor([[1.0, 2.0], [0.0, 0.0]])).tolist() == [0.0, 1.0]


def test_a_common_scale_and_the_split_into_columns_have_no_influence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gradients = standard_normal(5, 40, seed=3)
    weights = min_norm_weights(gradients)
    for scale in (1e-12, 1e12):
        torch.testing.assert_close(min_norm_weights(scale * gradients), weights, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(min_norm_weights_from_gram(gradients @ gradients.T), weights, rtol=1e-9, atol=1e-12)
    monkeypatch.setattr(min_norm_module, "COLUMNS", 7)
    torch.testing.assert_close(min_norm_weights(gradients), weights, rtol=1e-9, atol=1e-12)


def test_malformed_gradients_are_refused() -> None:
    for gradients in (torch.ones(3), torch.ones(0, 3), torch.ones(3, 0)):
        with pytest.raises(AggregationError, match="must be a matrix"):
            min_norm_weights(gradients)
    with pytest.raises(AggregationError, match="not all finite"):
        min_norm_weights(torch.tensor([[1.0, torch.nan]]))
    for gram in (torch.ones(2, 3), torch.ones(0, 0), torch.ones(2)):
        with pytest.raises(AggregationError, match="square matrix"):
            min_norm_weights_from_gram(gram)


def drifted(previous: dict[str, Tensor], count: int, seed: int) -> list[dict[str, Tensor]]:
    return [
        {
            name: x + 1 + k
            if not x.is_floating_point()
            else x + (1 + k) * standard_normal(*x.shape, seed=seed + k).to(x.dtype)
            for name, x in previous.items()
        }
        for k in range(count)
    ]


def model(dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    return {
        "b.weight": standard_normal(3, 4, seed=1).to(dtype),
        "a.bias": standard_normal(5, seed=2).to(dtype),
        "bn.running_mean": standard_normal(5, seed=3).to(dtype),
        "bn.num_batches_tracked": torch.tensor(7),
    }


def test_unified_aggregation_matches_a_hand_calculation() -> None:
    # Drifts (-3, 0) and (0, -1), normalised to length 2: their shortest combination is at 1/2 to 1/2, (-1, -1).
    previous = {"w": torch.tensor([1.0, 1.0])}
    updates = [{"w": torch.tensor([4.0, 1.0])}, {"w": torch.tensor([1.0, 2.0])}]
    moved = efficient_unified_aggregation(updates, previous, [1, 9], server_learning_rate=0.5)
    assert moved["w"].tolist() == pytest.approx([1.5, 1.5], rel=1e-6)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("budget", [1 << 22, 10])
def test_unified_aggregation_matches_its_equations(seed: int, budget: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedssl.aggregation.unified.BUDGET", budget)
    previous = model()
    updates, weights = drifted(previous, 4, seed), [1, 2, 3, 4]
    names = ["a.bias", "b.weight"]
    flat = {k: torch.cat([(previous[n] - update[n]).flatten() for n in names]) for k, update in enumerate(updates)}
    normalised = torch.stack([2 * g / g.norm() for g in flat.values()])
    step = 0.3 * (min_norm_weights(normalised) @ normalised)
    moved = efficient_unified_aggregation(updates, previous, weights, server_learning_rate=0.3)
    assert list(moved) == sorted(previous)
    torch.testing.assert_close(moved["a.bias"], previous["a.bias"] - step[:5], rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(moved["b.weight"], previous["b.weight"] - step[5:].view(3, 4), rtol=1e-10, atol=1e-10)
    mean = weighted_mean(updates, weights)
    for name in ("bn.running_mean", "bn.num_batches_tracked"):
        assert torch.equal(moved[name], mean[name])


def test_the_step_moves_the_model_closer_to_every_client() -> None:
    previous = {"w": standard_normal(20, seed=0)}
    updates = [{"w": previous["w"] + standard_normal(20, seed=k) + 1} for k in range(1, 6)]
    moved = efficient_unified_aggregation(updates, previous, [1] * 5, server_learning_rate=0.1)
    for update in updates:
        before, after = ((update["w"] - w).norm() for w in (previous["w"], moved["w"]))
        assert float(after) < float(before)


def test_clients_that_did_not_move_have_no_influence() -> None:
    previous = model(torch.float32)
    (update,) = drifted(previous, 1, 5)
    alone = efficient_unified_aggregation([update], previous, [1], server_learning_rate=0.1)
    still = {**previous, "bn.running_mean": update["bn.running_mean"], "bn.num_batches_tracked": torch.tensor(8)}
    together = efficient_unified_aggregation([still, update], previous, [1, 1], server_learning_rate=0.1)
    for name in previous:
        torch.testing.assert_close(together[name], alone[name])
    nobody = efficient_unified_aggregation([previous] * 3, previous, [1, 2, 3])
    for name, tensor in previous.items():
        assert torch.equal(nobody[name], tensor)
        assert nobody[name].data_ptr() != tensor.data_ptr()


def test_the_tensors_that_take_the_step_can_be_chosen() -> None:
    previous = model()
    updates = drifted(previous, 3, 0)
    mean = weighted_mean(updates, [1, 1, 1])
    moved = efficient_unified_aggregation(updates, previous, [1, 1, 1], 0.1, plain=lambda name: name != "a.bias")
    assert torch.equal(moved["b.weight"], mean["b.weight"])
    assert not torch.equal(moved["a.bias"], mean["a.bias"])


def test_inputs_that_cannot_be_combined_are_refused() -> None:
    previous = {"w": torch.ones(2)}
    with pytest.raises(AggregationError, match="0 updates for 0 weights"):
        efficient_unified_aggregation([], previous, [])
    with pytest.raises(AggregationError, match="1 updates for 2 weights"):
        efficient_unified_aggregation([previous], previous, [1, 1])
    with pytest.raises(AggregationError, match="server_learning_rate must be"):
        efficient_unified_aggregation([previous], previous, [1], 0.0)
    with pytest.raises(AggregationError, match="update 1 has other names"):
        efficient_unified_aggregation([previous, {}], previous, [1, 1])
    with pytest.raises(AggregationError, match="update 0 has w as"):
        efficient_unified_aggregation([{"w": torch.ones(3)}], previous, [1])
    with pytest.raises(AggregationError, match="not finite"):
        efficient_unified_aggregation([{"w": torch.tensor([1.0, torch.inf])}], previous, [1])
