"""Take batches of images, from memory or from a cache, and make views of them."""

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from fedssl.data.augment import normalize, random_view, to_float
from fedssl.data.crops import random_crop
from fedssl.data.image_cache.images import CachedImages, ImageBatch
from fedssl.protocol.data import DataConfig

Images = Tensor | CachedImages
"""All images of a client: uint8 or int16 (N, C, S, S) in memory, or in a cache."""


def index_device(images: Images) -> torch.device:
    """Return where the indices for :func:`take` are needed: the CPU for cached images, which it reads."""
    return images.device if isinstance(images, Tensor) else torch.device("cpu")


def take(images: Images, indices: Tensor) -> ImageBatch:
    """Return the images at `indices`, which are on the device of :func:`index_device`."""
    if isinstance(images, Tensor):
        return ImageBatch(images.index_select(0, indices))  # several times as fast as images[indices]
    return images.batch(indices)


def take_each(images: Images, batches: Iterable[Tensor]) -> Iterator[ImageBatch]:
    """Yield :func:`take` of each tensor of indices. Cached images are read ahead."""
    if isinstance(images, Tensor):
        return (take(images, indices) for indices in batches)
    return images.batches(batches)


def join(batches: Sequence[ImageBatch]) -> ImageBatch:
    """Return the images of all batches, one batch after the other."""
    pixels = [batch.pixels for batch in batches]
    if all(batch.sizes is None for batch in batches):
        return ImageBatch(torch.cat(pixels))
    height, width = (max(each.shape[dim] for each in pixels) for dim in (2, 3))
    padded = [F.pad(each, (0, width - each.shape[3], 0, height - each.shape[2])) for each in pixels]
    return ImageBatch(torch.cat(padded), torch.cat([_sizes(batch) for batch in batches]))


def random_views(batch: ImageBatch, data: DataConfig, generator: torch.Generator) -> Tensor:
    """Return one normalised random view of every image, float32 (B, C, S, S): see :func:`fedssl.data.random_view`."""
    return normalize(views_before_normalisation(batch, data, generator), data)


MakeViews = Callable[[Sequence[ImageBatch], DataConfig, torch.Generator], tuple[Tensor, ...]]
"""The type of :func:`each_view`."""


def each_view(batches: Sequence[ImageBatch], data: DataConfig, generator: torch.Generator) -> tuple[Tensor, ...]:
    """Return one normalised random view of every image of each batch. The second batch is seen with `data.second_view`,
    if there is one."""
    if data.second_view is None:
        return random_views(join(batches), data, generator).chunk(len(batches))
    second = data.model_copy(update={"augmentation": data.second_view})
    return tuple(random_views(batch, second if n == 1 else data, generator) for n, batch in enumerate(batches))


def local_views(batch: ImageBatch, data: DataConfig, generator: torch.Generator) -> tuple[Tensor, ...]:
    """Return the normalised local crops of every image, each (B, C, s, s); none if the data has none."""
    if (crops := data.local_crops) is None:
        return ()
    augmentation = data.augmentation.model_copy(update=crops.changes)
    small = data.model_copy(update={"image_size": crops.image_size, "augmentation": augmentation})
    images = join([batch] * crops.num_crops)
    if images.sizes is None:
        views = random_view(to_float(images.pixels), augmentation, generator, size=crops.image_size)
    else:
        views = random_crop(images, small, generator)
    return normalize(views, small).chunk(crops.num_crops)


def views_before_normalisation(batch: ImageBatch, data: DataConfig, generator: torch.Generator) -> Tensor:
    """Return one random view of every image, float32 (B, C, S, S) with values 0..1: what people can look at."""
    if batch.sizes is None:
        return random_view(to_float(batch.pixels), data.augmentation, generator)
    return random_crop(batch, data, generator)


def _sizes(batch: ImageBatch) -> Tensor:
    if batch.sizes is not None:
        return batch.sizes
    height, width = batch.pixels.shape[2:]
    sizes = torch.empty((len(batch), 2), dtype=torch.float32, device=batch.pixels.device)
    sizes[:, 0], sizes[:, 1] = height, width
    return sizes
