"""Normalisation layers of the convolutional encoders."""

import math
from collections.abc import Callable

from torch import nn

from fedssl.protocol.model import NormName

MOST_GROUPS = 32  # the groups of Wu and He 2018


def group_norm(channels: int) -> nn.GroupNorm:
    """Return GroupNorm with 32 groups, or with as many as divide both 32 and the number of channels."""
    return nn.GroupNorm(math.gcd(MOST_GROUPS, channels), channels)


def norm_layer(norm: NormName) -> Callable[[int], nn.Module]:
    """Return what makes a normalisation layer for a number of channels."""
    return nn.BatchNorm2d if norm == "batch" else group_norm
