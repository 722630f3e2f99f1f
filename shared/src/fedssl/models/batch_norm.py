"""BatchNorms in a federation: their tensors, and their statistics from other images (`model.batch_norm`)."""

from collections.abc import Iterable
from typing import TypeGuard

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fedssl.models.freezing import FixedBatchNorm


def norm_tensors(network: nn.Module) -> frozenset[str]:
    """Return the names of the scales, shifts, statistics and counters of the network's BatchNorms.

    Leaves out those that are frozen, which keep their first values at every client.

    >>> sorted(norm_tensors(nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2, affine=False))))
    ['1.num_batches_tracked', '1.running_mean', '1.running_var']
    """
    return frozenset(
        f"{prefix}.{name}" for prefix, each in network.named_modules() if _learns(each) for name in each.state_dict()
    )


@torch.no_grad()
def recalibrate(network: nn.Module, batches: Iterable[Tensor]) -> None:
    """Set the statistics of the network's BatchNorms to the means, over the batches, of the batches' own.

    A layer's statistics are those of what it receives while all layers before it normalise by the batch. Nothing else
    changes: no weight, no frozen BatchNorm, and not whether a module is in training mode. Without any batch, the
    statistics stay as they are.

    Reference: "precise BN" (Wu & Johnson 2021, Rethinking "Batch" in BatchNorm, Section 3), with equal weights for
    batches, as torch's `update_bn`.
    """
    norms = [each for each in network.modules() if _learns(each)]
    momenta = [norm.momentum for norm in norms]
    flags = {module: module.training for module in network.modules()}
    try:
        network.train()
        for number, batch in enumerate(batches):
            for norm in norms if number == 0 else ():
                norm.reset_running_stats()
                norm.momentum = None  # the mean over all batches so far
            network(batch)
    finally:
        for norm, momentum in zip(norms, momenta, strict=True):
            norm.momentum = momentum
        for module, flag in flags.items():
            module.training = flag


def _learns(module: nn.Module) -> TypeGuard[_BatchNorm]:
    """Return whether a module is a BatchNorm whose statistics change in training."""
    return isinstance(module, _BatchNorm) and not isinstance(module, FixedBatchNorm)
