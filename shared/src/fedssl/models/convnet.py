"""The small encoder for CPUs."""

from itertools import pairwise

import torch
from torch import Tensor, nn

from fedssl.models.encoders import Encoder
from fedssl.models.norms import norm_layer
from fedssl.protocol.model import EncoderConfig, NormName


class ConvBlock(nn.Module):
    """3x3 convolution of stride 2, a normalisation, ReLU: halves height and width.

    The stride replaces pooling: on two CPU cores, it trains about three times as many images per second as max-pooling.
    """

    def __init__(self, in_channels: int, out_channels: int, norm: NormName) -> None:
        super().__init__()
        self.conv = nn.Conv2d(in_channels, out_channels, kernel_size=3, stride=2, padding=1, bias=False)
        self.bn = norm_layer(norm)(out_channels)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.bn(self.conv(x)))


class ConvNet(Encoder):
    """A :class:`ConvBlock` per width, then the mean over the remaining positions."""

    def __init__(self, channels: int, widths: tuple[int, ...], norm: NormName) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(ConvBlock(a, b, norm) for a, b in pairwise((channels, *widths))))
        self.feature_dim = widths[-1]

    def layer_prefixes(self) -> list[tuple[str, ...]]:
        """Return one layer per block."""
        return [(f"blocks.{number}.",) for number in range(len(self.blocks))]

    def forward(self, x: Tensor) -> Tensor:
        return self.run_blocks(self.blocks, x).mean(dim=(2, 3))


def build_convnet(config: EncoderConfig, channels: int, image_size: int | None) -> Encoder:
    """Return the small encoder for CPUs."""
    return ConvNet(channels, config.widths, config.norm)
