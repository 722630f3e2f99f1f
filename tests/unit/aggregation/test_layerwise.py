"""L-DAWA, compared with hand calculations and plain loops."""

import numpy as np
import pytest
import torch

from fedssl.aggregation import AggregationError, is_batch_norm_buffer, layerwise_divergence_aware, weighted_mean
from support.tensors import standard_normal


def test_l_dawa_matches_a_hand_calculation() -> None:
    previous = {"w": torch.tensor([1.0, 0.0]), "v": torch.tensor([0.0, 2.0])}
    updates = [
        # w at 45 degrees: cosine 0.7071 times (2, 2). v is parallel to the previous one, and longer: cosine 1.
        {"w": torch.tensor([2.0, 2.0]), "v": torch.tensor([0.0, 6.0])},
        # w opposite: cosine -1 times (-4, 0) is (4, 0). v is orthogonal: 0.
        {"w": torch.tensor([-4.0, 0.0]), "v": torch.tensor([5.0, 0.0])},
    ]
    combined = layerwise_divergence_aware(updates, previous)
    assert list(combined) == ["v", "w"]
    # (1.4142 + 4)/2, 1.4142/2; and (0, 6)/2.
    assert combined["w"].tolist() == pytest.approx([2.7071067811865475, 0.7071067811865475], rel=1e-6)
    assert combined["v"].tolist() == [0.0, 3.0]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_l_dawa_matches_its_equation(seed: int, dtype: torch.dtype) -> None:
    shapes = {"conv.weight": (4, 3, 2), "fc.bias": (5,)}
    previous = {name: standard_normal(*shape, seed=seed, dtype=dtype) for name, shape in shapes.items()}
    updates = [
        {
            name: 0.5 * previous[name] + standard_normal(*shape, seed=seed + 10 * k, dtype=dtype)
            for name, shape in shapes.items()
        }
        for k in (1, 2, 3)
    ]
    combined = layerwise_divergence_aware(iter(updates), previous)
    for name, shape in shapes.items():
        expected = np.zeros(shape)
        old = previous[name].double().numpy()
        for update in updates:
            new = update[name].double().numpy()
            cosine = np.sum(new * old) / (np.linalg.norm(new) * np.linalg.norm(old))
            expected += min(1.0, cosine) * new / 3
        tolerance = 4 * torch.finfo(dtype).eps
        assert combined[name].double().numpy() == pytest.approx(expected, rel=tolerance, abs=tolerance)
        assert combined[name].dtype == dtype


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_clients_equal_to_the_global_model_return_it_unchanged(dtype: torch.dtype) -> None:
    previous = {
        "w": standard_normal(1000, seed=0, dtype=dtype),
        "bn.running_var": standard_normal(5, seed=1, dtype=dtype).abs(),
    }
    combined = layerwise_divergence_aware([previous] * 3, previous)
    mean = weighted_mean([previous] * 3, [1, 1, 1])
    for name, tensor in previous.items():
        assert torch.equal(combined[name], tensor)
        assert torch.equal(combined[name], mean[name])


def test_clients_that_only_changed_in_length_are_averaged_plainly() -> None:
    previous = {"w": standard_normal(50, seed=0)}
    updates = [{"w": previous["w"] * factor} for factor in (0.5, 1.0, 3.0)]
    combined = layerwise_divergence_aware(updates, previous)
    torch.testing.assert_close(combined["w"], weighted_mean(updates, [1, 1, 1])["w"], rtol=1e-14, atol=0)


def test_statistics_integers_scalars_and_zeros_are_averaged_plainly() -> None:
    previous = {
        "bn.running_mean": torch.tensor([1.0, 0.0]),
        "bn.num_batches_tracked": torch.tensor([10, 10]),
        "temperature": torch.tensor(2.0),
        "fresh.bias": torch.zeros(2),
        "w": torch.tensor([1.0, 0.0]),
    }
    first = {
        "bn.running_mean": torch.tensor([0.0, 4.0]),
        "bn.num_batches_tracked": torch.tensor([11, 12]),
        "temperature": torch.tensor(-4.0),
        "fresh.bias": torch.tensor([2.0, 2.0]),
        "w": torch.zeros(2),
    }
    second = {name: torch.zeros_like(tensor) for name, tensor in first.items()}
    combined = layerwise_divergence_aware([first, second], previous)
    assert combined["bn.running_mean"].tolist() == [0.0, 2.0]
    assert combined["bn.num_batches_tracked"].tolist() == [6, 6]  # 5.5 and 6, half to even
    assert combined["bn.num_batches_tracked"].dtype == torch.int64
    assert combined["temperature"].item() == -2.0
    assert combined["fresh.bias"].tolist() == [1.0, 1.0]
    assert combined["w"].tolist() == [0.0, 0.0]
    # As in the authors' code: statistics orthogonal to the previous ones contribute nothing.
    everything = layerwise_divergence_aware([first, second], previous, plain=lambda name: False)
    assert everything["bn.running_mean"].tolist() == [0.0, 0.0]


def test_batch_norm_buffers_are_recognised_by_their_names() -> None:
    plain = ["running_mean", "layer1.0.bn2.running_var", "bn.num_batches_tracked"]
    scaled = ["bn.weight", "running_mean.weight", "fc.bias", "my_running_mean"]
    assert all(is_batch_norm_buffer(name) for name in plain)
    assert not any(is_batch_norm_buffer(name) for name in scaled)


def test_inputs_that_cannot_be_combined_are_refused() -> None:
    previous = {"w": torch.ones(2)}
    with pytest.raises(AggregationError, match="there are no updates"):
        layerwise_divergence_aware([], previous)
    with pytest.raises(AggregationError, match="update 0 has other names"):
        layerwise_divergence_aware([{"v": torch.ones(2)}], previous)
    with pytest.raises(AggregationError, match="update 0 has w as"):
        layerwise_divergence_aware([{"w": torch.ones(3)}], previous)
    with pytest.raises(AggregationError, match="update 1 has w as"):
        layerwise_divergence_aware([previous, {"w": torch.ones(2).half()}], previous)
