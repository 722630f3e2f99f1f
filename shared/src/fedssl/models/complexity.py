"""The cost of a forward pass."""

import copy
from collections.abc import Sequence

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode


def num_multiply_adds(module: nn.Module, input_shape: Sequence[int]) -> int:
    """Return the multiply-adds of one example's forward pass, counted in all matrix products: convolutions, linear
    layers and their adapters, and attention.

    Args:
        module: any network; it does not change.
        input_shape: of one example, without the batch: (C, S, S) for an encoder, (D,) for a head.

    Training costs about three times as much: the backward pass makes a gradient for the weights and one for the input.
    """
    # On the meta device nothing is computed, and attention is not fused into an operation that the counter does not
    # know.
    network = copy.deepcopy(module).to("meta").eval()
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        network(torch.zeros(1, *input_shape, device="meta"))
    return int(counter.get_total_flops()) // 2
