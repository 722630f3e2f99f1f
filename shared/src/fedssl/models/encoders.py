"""Encoders: from images x of shape (B, C, S, S) to representations h of shape (B, H). Each family has a module."""

import importlib
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from fedssl.models.checkpointing import recomputed
from fedssl.protocol.model import ENCODERS, EncoderConfig


class Encoder(nn.Module):
    """Base of the encoders; `feature_dim` is H, the width of the representation."""

    feature_dim: int

    libraries: tuple[str, ...] = ()
    """The libraries, `torchvision` and `timm`, that have this network under these tensor names."""

    positions: str | None = None
    """The name of its position embeddings (1, 1 + N, H), of a class token and a square grid, if it has any."""

    bypassed: frozenset[str] = frozenset()
    """The names of linear layers whose weights it uses without calling them, so an adapter would have no effect."""

    recomputes: bool = False
    """True if training computes the activations inside each block again for its gradients, and does not keep them."""

    def run_blocks(self, blocks: Iterable[nn.Module], x: Tensor) -> Tensor:
        """Return the output of blocks, one after the other. `forward` uses this for what takes most memory."""
        for block in blocks:
            x = recomputed(block, x) if self.recomputes and torch.is_grad_enabled() else block(x)
        return x

    def layer_prefixes(self) -> list[tuple[str, ...]]:
        """Return the prefixes of the names of each layer's parameters, from the input to the output.

        Layer-wise learning rates follow this order. Parameters without such a prefix belong to the heads.
        """
        raise NotImplementedError

    def convolutions(self) -> list[str]:
        """Return the names of the convolution weights, over which FedU and FedEMA measure how far the encoder moved."""
        return [f"{name}.weight" for name, module in self.named_modules() if isinstance(module, nn.Conv2d)]

    def forward(self, x: Tensor) -> Tensor:
        """Return the representations (B, H) of images (B, C, S, S)."""
        raise NotImplementedError


def build_encoder(config: EncoderConfig, channels: int, image_size: int | None = None) -> Encoder:
    """Return the encoder that `config` names, for images of `channels` channels, with fresh random weights on the CPU.

    Only encoders with position embeddings need `image_size`, the height and width of the images.

    Wrap the call in :func:`fedssl.models.initialised` to get the same weights every time.
    """
    module, _, name = ENCODERS[config.name].builder.partition(":")
    build: Callable[[EncoderConfig, int, int | None], Encoder] = getattr(importlib.import_module(module), name)
    return build(config, channels, image_size)
