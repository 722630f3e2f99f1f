"""Normalisation layers of the convolutional encoders."""

import math
from collections.abc import Callable

from torch import nn

from fedssl.protocol.model import NormName

MOST_GROUPS = 32  # the groups of Wu and He 2018


def group_norm(channels: int) -> nn.GroupNorm:
    """Return GroupNorm with 32 groups, or with as many as divide both 32 and the number of channels."""
    return nn.GroupNorm(math.gcd(MOST_GROUPS, channels), channels)


def layer_norm(channels: int) -> nn.GroupNorm:
    """Return LayerNorm over all channels and pixels of an image (Ba et al. 2016), with a scale and a shift per channel.

    It is GroupNorm with one group (Wu and He 2018, Section 3.1).
    """
    return nn.GroupNorm(1, channels)


def norm_layer(norm: NormName) -> Callable[[int], nn.Module]:
    """Return a function that makes a normalisation layer for a number of channels."""
    makers: dict[NormName, Callable[[int], nn.Module]] = {
        "batch": nn.BatchNorm2d,
        "group": group_norm,
        "layer": layer_norm,
    }
    return makers[norm]
