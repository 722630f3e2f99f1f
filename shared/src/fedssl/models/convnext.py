"""ConvNeXts, with timm's tensor names."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedssl.models.encoders import Encoder
from fedssl.models.vision_transformer import MLP
from fedssl.protocol.model import EncoderConfig

EPSILON = 1e-6
"""Added to the variance in a LayerNorm."""
_DEVIATION = 0.02  # deviation of the truncated normal distribution from which weights start
_FIRST_SCALE = 1e-6  # first scale of each block's change, which is almost nothing
_WIDTHS = (96, 192, 384, 768)
_DEPTHS = {"convnext-tiny": (3, 3, 9, 3), "convnext-small": (3, 3, 27, 3)}


class ChannelNorm(nn.LayerNorm):
    """LayerNorm over the channels of each position of (B, C, S, S)."""

    def __init__(self, width: int) -> None:
        super().__init__(width, eps=EPSILON)

    def forward(self, x: Tensor) -> Tensor:
        normalised = F.layer_norm(x.permute(0, 2, 3, 1), self.normalized_shape, self.weight, self.bias, self.eps)
        return normalised.permute(0, 3, 1, 2)


class Block(nn.Module):
    """A 7x7 convolution of each channel, LayerNorm and an MLP of each position, scaled, with a shortcut around them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv_dw = nn.Conv2d(width, width, kernel_size=7, padding=3, groups=width)
        self.norm = nn.LayerNorm(width, eps=EPSILON)
        self.mlp = MLP(width)
        self.gamma = nn.Parameter(torch.full((width,), _FIRST_SCALE))

    def forward(self, x: Tensor) -> Tensor:
        change = self.mlp(self.norm(self.conv_dw(x).permute(0, 2, 3, 1))).permute(0, 3, 1, 2)
        changed: Tensor = x + self.gamma[:, None, None] * change
        return changed


class Stage(nn.Module):
    """Blocks of one width; all stages but the first halve height and width before them."""

    def __init__(self, before: int, width: int, depth: int) -> None:
        super().__init__()
        halve = (ChannelNorm(before), nn.Conv2d(before, width, kernel_size=2, stride=2))
        self.downsample = nn.Sequential(*(halve if before != width else ()))
        self.blocks = nn.Sequential(*(Block(width) for _ in range(depth)))


class ConvNeXt(Encoder):
    """The ConvNeXt of Liu et al. 2022 (Section 2), as timm has it, without stochastic depth.

    A 4x4 convolution of stride 4 and four stages; the representation is the LayerNorm of the mean over the positions.
    It has no BatchNorm. Weights load in both directions, without timm's classifier `head.fc`, and start as timm's: of
    a truncated normal distribution of deviation 0.02, biases 0, and each block's scale `gamma` 1e-6.
    """

    libraries = ("timm",)

    def __init__(self, channels: int, widths: Sequence[int], depths: Sequence[int]) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(channels, widths[0], kernel_size=4, stride=4), ChannelNorm(widths[0]))
        before = (widths[0], *widths[:-1])
        self.stages = nn.Sequential(*map(Stage, before, widths, depths))
        self.head = nn.ModuleDict({"norm": nn.LayerNorm(widths[-1], eps=EPSILON)})
        self.feature_dim = widths[-1]
        for module in self.modules():
            if isinstance(module, nn.Conv2d | nn.Linear):
                nn.init.trunc_normal_(module.weight, std=_DEVIATION)
                assert module.bias is not None, "all of them have one"
                nn.init.zeros_(module.bias)

    def layer_prefixes(self) -> list[tuple[str, ...]]:
        """Return the stem, and one layer per stage. The last LayerNorm has the rate of the heads."""
        return [("stem.",), *((f"stages.{number}.",) for number in range(len(self.stages)))]

    def convolutions(self) -> list[str]:
        """Return the names of all convolution weights; the linear maps of each position are 1x1 convolutions."""
        return [f"{name}.weight" for name, each in self.named_modules() if isinstance(each, nn.Conv2d | nn.Linear)]

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for stage in self.stages:
            assert isinstance(stage, Stage)
            x = self.run_blocks(stage.blocks, stage.downsample(x))
        pooled: Tensor = self.head["norm"](x.mean(dim=(2, 3)))
        return pooled


def build_convnext(config: EncoderConfig, channels: int, image_size: int | None) -> Encoder:
    """Return the ConvNeXt of the config's name."""
    return ConvNeXt(channels, _WIDTHS, _DEPTHS[config.name])
