"""Augmentations, pixel statistics and partitions of the published code, or of this project if no code is published."""

from types import MappingProxyType
from typing import Final

from fedssl.protocol.data import AugmentationConfig, PartitionConfig

_STRONG = AugmentationConfig(
    min_scale=0.2, brightness=0.8, contrast=0.8, saturation=0.8, hue=0.2, jitter=0.8, greyscale=0.2, flip=0.5
)
_ORCHESTRA = AugmentationConfig(
    min_scale=0.5, brightness=0.4, contrast=0.4, saturation=0.2, hue=0.1, jitter=0.8, greyscale=0.2, flip=0.5
)

AUGMENTATIONS: Final = MappingProxyType(
    {
        # FedX's colour jitter on CIFAR-10 has strength 0 in the released code.
        "fedx-cifar10": AugmentationConfig(
            crop="padded", padding=4, padding_mode="reflect", flip=0.5, jitter=0, greyscale=0
        ),
        "fedx-svhn": AugmentationConfig(
            crop="padded", padding=4, flip=0, jitter=1, brightness=0.4, contrast=0.4, saturation=0.4, hue=0.4,
            greyscale=0, rotation_degrees=15,
        ),
        # BYOL, SimCLR, SimSiam and MoCo v2 in EasyFL (FedU, FedEMA).
        "easyfl": _STRONG.model_copy(update={"min_scale": 0.08}),
        "easyfl-moco-v1": AugmentationConfig(
            min_scale=0.08, brightness=0.4, contrast=0.4, saturation=0.4, hue=0.1, jitter=0.8, greyscale=0.2
        ),
        "ssd": _STRONG.model_copy(update={"min_scale": 0.08}),
        "fedu2": _STRONG,
        "flesd-cifar": _STRONG,
        "flesd-imagenet": _STRONG.model_copy(
            update={"hue": 0.4, "greyscale": 0.5, "blur": 0.5, "blur_sigma": (0.1, 2.0)}
        ),
        "orchestra-1": _ORCHESTRA.model_copy(update={"blur": 0.5}),
        "orchestra-2": _ORCHESTRA.model_copy(update={"blur": 0.1, "solarize": 0.2}),
        # Not published: FedX's figures for Fashion-MNIST come without an augmentation.
        "fashion-mnist": AugmentationConfig(
            crop="padded", padding=4, flip=0.5, jitter=1, brightness=0.4, contrast=0.4, saturation=0, hue=0, greyscale=0
        ),
    }
)  # fmt: skip
"""Augmentations by the code that uses them. Orchestra rotates its third view, `orchestra-1`, by multiples of 90°."""

Statistics = tuple[tuple[float, ...], tuple[float, ...]]

NORMALIZATIONS: Final[MappingProxyType[str, Statistics]] = MappingProxyType(
    {
        "fedx-cifar10": ((125.3 / 255, 123.0 / 255, 113.9 / 255), (63.0 / 255, 62.1 / 255, 66.7 / 255)),
        "fedx-svhn": ((0.4377, 0.4438, 0.4728), (0.1980, 0.2010, 0.1970)),
        "half": ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5)),  # FLESD on CIFAR, Orchestra
        "imagenet": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
        "fashion-mnist": ((0.2860,), (0.3530,)),
    }
)
"""Mean and standard deviation of each channel, for pixels in 0..1. EasyFL, SSD and FedU2 do not normalise."""

_CIFAR10 = PartitionConfig(dataset="cifar10")
_FIVE = _CIFAR10.model_copy(update={"num_clients": 5})

PARTITIONS: Final[MappingProxyType[str, PartitionConfig]] = MappingProxyType(
    {
        "fedx": _CIFAR10.model_copy(update={"num_clients": 10, "alpha": 0.5}),
        "ssd": _CIFAR10.model_copy(update={"num_clients": 10, "alpha": 0.1, "variant": "ssd"}),
        # A fifth of the clients in each round: cohort.fraction 0.2.
        "ssd-cross-device": _CIFAR10.model_copy(update={"num_clients": 50, "alpha": 0.1, "variant": "ssd"}),
        "fedu-iid": _FIVE.model_copy(update={"scheme": "iid", "alpha": None}),
        "fedu-classes": _FIVE.model_copy(update={"scheme": "classes", "alpha": None}),
        # Also with alpha 0.5. FedRLC published no code; EasyFL, on which it builds, partitions as FedX does.
        "fedrlc-dirichlet": _FIVE.model_copy(update={"alpha": 0.1}),
        # Also with alpha 100 and 0.01. client-0's images are public, and it does not train.
        "flesd": _CIFAR10.model_copy(update={"num_clients": 6, "alpha": 1.0, "variant": "flesd"}),
        # Half of the clients in each round: cohort.fraction 0.5.
        "orchestra": _CIFAR10.model_copy(update={"num_clients": 100, "alpha": 0.1, "variant": "orchestra"}),
    }
)
"""The papers' partitions of CIFAR-10. Change `dataset`, `alpha` or `share` in a copy for the tables' other columns."""
