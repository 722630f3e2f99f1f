"""Encoders: from images x of shape (B, C, S, S) to representations h of shape (B, H)."""

import importlib
from collections.abc import Callable
from itertools import pairwise
from typing import ClassVar

import torch
from torch import Tensor, nn

from fedssl.models.torchvision_guard import import_torchvision
from fedssl.protocol.model import ENCODERS, EncoderConfig


class Encoder(nn.Module):
    """Base of the encoders; `feature_dim` is H, the width of the representation."""

    feature_dim: int

    is_torchvisions: ClassVar[bool] = False
    """Whether torchvision and timm have this network under these tensor names."""

    def convolutions(self) -> list[str]:
        """Return the names of the convolution weights, over which FedU and FedEMA measure how far the encoder moved."""
        return [f"{name}.weight" for name, module in self.named_modules() if isinstance(module, nn.Conv2d)]

    def forward(self, x: Tensor) -> Tensor:
        """Representations (B, H) of images (B, C, S, S)."""
        raise NotImplementedError


class ConvBlock(nn.Module):
    """3x3 convolution of stride 2, BatchNorm, ReLU: halves height and width.

    The stride replaces pooling: on two CPU cores, it trains about three times as many images per second as max-pooling.
    """

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(in_channels, out_channels, kernel_size=3, stride=2, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(out_channels)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.bn(self.conv(x)))


class ConvNet(Encoder):
    """A :class:`ConvBlock` per width, then the mean over the remaining positions."""

    def __init__(self, channels: int, widths: tuple[int, ...]) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(ConvBlock(a, b) for a, b in pairwise((channels, *widths))))
        self.feature_dim = widths[-1]

    def forward(self, x: Tensor) -> Tensor:
        features: Tensor = self.blocks(x)
        return features.mean(dim=(2, 3))


class ResNet(Encoder):
    """torchvision's ResNet without its classifier, with its parameter names, so weights load in both directions.

    `stem="cifar"` replaces the 7x7 convolution of stride 2 by a 3x3 one of stride 1 and omits the max-pool, as all
    published code for 32x32 images does. Convolutions start from torchvision's kaiming_normal (fan_out).
    """

    is_torchvisions: ClassVar[bool] = True

    def __init__(self, name: str, stem: str, channels: int) -> None:
        super().__init__()
        network = getattr(import_torchvision().models, name)(weights=None)
        small = stem == "cifar"
        if small or channels != 3:
            size, stride, padding = (3, 1, 1) if small else (7, 2, 3)
            network.conv1 = nn.Conv2d(channels, 64, size, stride=stride, padding=padding, bias=False)
            nn.init.kaiming_normal_(network.conv1.weight, mode="fan_out", nonlinearity="relu")
        for child_name, child in network.named_children():
            if child_name == "fc" or (child_name == "maxpool" and small):
                continue
            self.add_module(child_name, child)
        self.feature_dim = EncoderConfig(name=name).feature_dim

    def convolutions(self) -> list[str]:
        """Return the names of the convolution weights of the stem and the blocks, but not of the shortcuts (EasyFL)."""
        return [name for name in super().convolutions() if "downsample" not in name.split(".")]

    def forward(self, x: Tensor) -> Tensor:
        for child in self.children():
            x = child(x)
        return torch.flatten(x, 1)


def build_convnet(config: EncoderConfig, channels: int) -> Encoder:
    """Return the small encoder for CPUs."""
    return ConvNet(channels, config.widths)


def build_resnet(config: EncoderConfig, channels: int) -> Encoder:
    """Return torchvision's ResNet of the config's name."""
    return ResNet(config.name, config.stem, channels)


def build_encoder(config: EncoderConfig, channels: int) -> Encoder:
    """Return the encoder that `config` names, for images of `channels` channels, with fresh random weights on the CPU.

    Wrap the call in :func:`fedssl.models.initialised` to get the same weights every time.
    """
    module, _, name = ENCODERS[config.name].builder.partition(":")
    build: Callable[[EncoderConfig, int], Encoder] = getattr(importlib.import_module(module), name)
    return build(config, channels)
