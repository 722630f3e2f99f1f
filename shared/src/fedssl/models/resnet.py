"""torchvision's ResNets."""

import torch
from torch import Tensor, nn

from fedssl.models.encoders import Encoder
from fedssl.models.norms import norm_layer
from fedssl.models.torchvision_guard import import_torchvision
from fedssl.protocol.model import EncoderConfig


class ResNet(Encoder):
    """torchvision's ResNet without its classifier, with its parameter names, so weights load in both directions.

    `stem="cifar"` replaces the 7x7 convolution of stride 2 by a 3x3 one of stride 1 and omits the max-pool, as all
    published code for 32x32 images does. `norm` may replace each BatchNorm by another layer. Convolutions start from
    torchvision's kaiming_normal (fan_out), or with `first_weights="torch"` from PyTorch's default, whose weights are
    shorter by a factor of 2.4 if fan_in equals fan_out.
    """

    def __init__(self, config: EncoderConfig, channels: int) -> None:
        super().__init__()
        make = getattr(import_torchvision().models, config.name)
        network = make(weights=None, norm_layer=norm_layer(config.norm))
        small = config.stem == "cifar"
        if small or channels != 3:
            size, stride, padding = (3, 1, 1) if small else (7, 2, 3)
            network.conv1 = nn.Conv2d(channels, 64, size, stride=stride, padding=padding, bias=False)
            nn.init.kaiming_normal_(network.conv1.weight, mode="fan_out", nonlinearity="relu")
        for child_name, child in network.named_children():
            if child_name == "fc" or (child_name == "maxpool" and small):
                continue
            self.add_module(child_name, child)
        if config.first_weights == "torch":
            for module in self.modules():
                if isinstance(module, nn.Conv2d):
                    module.reset_parameters()
        self.feature_dim = config.feature_dim
        if config.norm == "batch":
            self.libraries = ("torchvision", "timm")

    def layer_prefixes(self) -> list[tuple[str, ...]]:
        """Return the stem, and one layer per stage of residual blocks."""
        return [("conv1.", "bn1."), *((f"layer{number}.",) for number in range(1, 5))]

    def convolutions(self) -> list[str]:
        """Return the names of the convolution weights of the stem and the blocks, but not of the shortcuts (EasyFL)."""
        return [name for name in super().convolutions() if "downsample" not in name.split(".")]

    def forward(self, x: Tensor) -> Tensor:
        for child in self.children():
            x = self.run_blocks(child, x) if isinstance(child, nn.Sequential) else child(x)
        return torch.flatten(x, 1)


def build_resnet(config: EncoderConfig, channels: int, image_size: int | None) -> Encoder:
    """Return torchvision's ResNet of the config's name."""
    return ResNet(config, channels)
