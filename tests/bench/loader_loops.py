"""The usual way to train SimCLR: views made by PIL in the processes of a DataLoader, with torchvision's or lightly's
transforms. The strengths of the augmentations are the spec's."""

import itertools
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from fedssl.models import import_torchvision
from fedssl.protocol.data import DataConfig

Transform = Callable[[Image.Image], list[Tensor]]
Loss = Callable[[Tensor, Tensor], Tensor]


def torchvision_views(data: DataConfig) -> Transform:
    """Return two views by torchvision's transforms of PIL images."""
    transforms, config = import_torchvision().transforms, data.augmentation
    jitter = transforms.ColorJitter(config.brightness, config.contrast, config.saturation, config.hue)
    view = transforms.Compose(
        [
            transforms.RandomResizedCrop(data.image_size, scale=(config.min_scale, config.max_scale)),
            transforms.RandomHorizontalFlip(config.flip),
            transforms.RandomApply([jitter], p=config.jitter),
            transforms.RandomGrayscale(config.greyscale),
            transforms.ToTensor(),
        ]
    )
    return partial(_two_views, view)


def _two_views(view: Callable[[Image.Image], Tensor], image: Image.Image) -> list[Tensor]:
    return [view(image), view(image)]


def lightly_parts(data: DataConfig, temperature: float) -> tuple[Transform, Loss]:
    """Return lightly's transform and loss of SimCLR."""
    import_torchvision()
    from lightly.loss import NTXentLoss
    from lightly.transforms import SimCLRTransform

    config = data.augmentation
    transform = SimCLRTransform(
        input_size=data.image_size, cj_prob=config.jitter, cj_strength=1.0, cj_bright=config.brightness,
        cj_contrast=config.contrast, cj_sat=config.saturation, cj_hue=config.hue, min_scale=config.min_scale,
        random_gray_scale=config.greyscale, gaussian_blur=config.blur, hf_prob=config.flip, normalize=None,
    )  # fmt: skip
    return transform, NTXentLoss(temperature=temperature)


class Images(Dataset[list[Tensor]]):
    """Random images, each used many times, so that no epoch ends during a measurement."""

    def __init__(self, size: int, transform: Transform, num_images: int = 2048, length: int = 400_000) -> None:
        self._images = np.random.default_rng(0).integers(0, 256, (num_images, size, size, 3), dtype=np.uint8)
        self._transform, self._length = transform, length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> list[Tensor]:
        return self._transform(Image.fromarray(self._images[index % len(self._images)]))


def loaded_views(
    transform: Transform, data: DataConfig, batch_size: int, device: torch.device, num_workers: int
) -> Iterator[Tensor]:
    """Yield the views of one batch after another without end: (2B, C, H, W) on the device, channels last."""
    loader = DataLoader(
        Images(data.image_size, transform), batch_size, shuffle=True, drop_last=True, num_workers=num_workers,
        persistent_workers=num_workers > 0, pin_memory=device.type == "cuda", timeout=30 if num_workers else 0,
    )  # fmt: skip
    for views in itertools.chain.from_iterable(itertools.repeat(loader)):
        on_device = torch.cat([view.to(device, non_blocking=True) for view in views])
        yield on_device.contiguous(memory_format=torch.channels_last)
