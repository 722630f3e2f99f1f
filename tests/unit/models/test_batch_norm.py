"""BatchNorm's tensors, and its recalibration on other images, with values worked out by hand."""

import torch
from torch import nn

from fedssl.models.batch_norm import norm_tensors, recalibrate
from fedssl.models.freezing import freeze


def test_recalibrated_statistics_are_the_means_over_the_batches() -> None:
    """Batches (0, 2) and (10, 14) have the means 1 and 12, and the unbiased variances 2 and 8."""
    network = nn.Sequential(nn.BatchNorm1d(1), nn.Dropout(0.5))
    network.eval()
    network[0].train()
    weight = network[0].weight.clone()
    recalibrate(network, [torch.tensor([[0.0], [2.0]]), torch.tensor([[10.0], [14.0]])])
    norm = network[0]
    assert (float(norm.running_mean), float(norm.running_var), int(norm.num_batches_tracked)) == (6.5, 5.0, 2)
    assert norm.momentum == 0.1
    assert torch.equal(norm.weight, weight)
    assert (network.training, norm.training, network[1].training) == (False, True, False)
    recalibrate(network, [])
    assert (float(norm.running_mean), int(norm.num_batches_tracked)) == (6.5, 2)


def test_frozen_norms_keep_their_statistics_and_are_not_listed() -> None:
    network = nn.Sequential(nn.Conv2d(1, 1, 1), nn.BatchNorm2d(1), nn.Conv2d(1, 1, 1), nn.BatchNorm2d(1))
    freeze(network, ["2.*", "3.*"])
    names = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
    assert norm_tensors(network) == {f"3.{name}" for name in names}
    before = {name: tensor.clone() for name, tensor in network[1].state_dict().items()}
    recalibrate(network, [torch.rand(4, 1, 2, 2)])
    assert all(torch.equal(before[name], tensor) for name, tensor in network[1].state_dict().items())
    assert int(network[3].num_batches_tracked) == 1
