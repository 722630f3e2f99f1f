"""The cost of a forward pass."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fedssl.models.vision_transformer import Attention

_COUNTED = (nn.Conv2d, nn.Linear, Attention)


def num_multiply_adds(module: nn.Module, input_shape: Sequence[int]) -> int:
    """Return the multiply-adds of one example's forward pass, counted in convolutions, linear layers and attention.

    Args:
        module: any network; its parameters, buffers and training flags do not change.
        input_shape: of one example, without the batch: (C, S, S) for an encoder, (D,) for a head.

    Training costs about three times as much: the backward pass makes a gradient for the weights and one for the input.
    """
    total = 0

    def count(layer: nn.Module, _inputs: Any, output: Tensor) -> None:
        nonlocal total
        if isinstance(layer, nn.Conv2d):
            total += output.numel() * layer.weight[0].numel()
        elif isinstance(layer, nn.Linear):
            total += output.numel() * layer.in_features
        elif isinstance(layer, Attention):
            total += 2 * output.numel() * output.shape[1]  # each token with each other one: scores, then values

    handles = [m.register_forward_hook(count) for m in module.modules() if isinstance(m, _COUNTED)]
    training = {m: m.training for m in module.modules()}
    device = next((p.device for p in module.parameters()), torch.device("cpu"))
    try:
        module.eval()
        with torch.no_grad():
            module(torch.zeros(1, *input_shape, device=device))
    finally:
        for handle in handles:
            handle.remove()
        for m, flag in training.items():
            m.training = flag
    return total
