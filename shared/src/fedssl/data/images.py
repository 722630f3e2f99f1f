"""Images in memory, independent of the format from which they were read."""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from fedssl.data.windowing import FULL, Pixels, window_arrays
from fedssl.errors import DataError
from fedssl.protocol.data import DataConfig, WindowConfig

_LUMA = (0.299, 0.587, 0.114)
_CHUNK = 2048
_MOST_CLASSES = 1_000_000


@dataclass(frozen=True, slots=True)
class ImageData:
    """Images of one size, with or without labels.

    Attributes:
        images: array (N, C, H, W) of 1 to 16 channels, uint8 with values 0..255, or int16 with values 0..32,767, which
            a window of 16 bits gives; both stand for 0..1. It may be memory-mapped and is never written to. Its strides
            are those of C order.
        labels: int64 array (N,) of class numbers, or None for unlabelled images.
        class_names: the classes by number; empty if the format has no names.
        unreadable: the sorted positions, in the listing of a folder, of the files that could not be read. The images
            are the others, in the order of the listing.
        groups: int64 numbers (N,), equal for the images of one group (a patient), which no split separates; or None.

    Raises :class:`~fedssl.errors.DataError` if the arrays do not fit together.
    """

    images: Pixels
    labels: NDArray[np.int64] | None = None
    class_names: tuple[str, ...] = ()
    unreadable: tuple[int, ...] = ()
    groups: NDArray[np.int64] | None = None

    def __post_init__(self) -> None:
        if self.images.dtype not in FULL or self.images.ndim != 4 or not 1 <= self.images.shape[1] <= 16:
            raise DataError(
                f"images must be a uint8 or int16 array (N, C, H, W) with 1 to 16 channels; "
                f"got {self.images.dtype} of shape {self.images.shape}"
            )
        # Every reader gives the same layout in memory. With one channel an array can be contiguous and still have other
        # strides, by which torch chooses its kernels, so equal images would give different bits.
        object.__setattr__(self, "images", self.images.reshape(-1).reshape(self.images.shape))
        if self.labels is None:
            return
        if self.labels.dtype != np.int64 or self.labels.shape != (len(self.images),):
            raise DataError(
                f"labels must be one int64 number per image, shape ({len(self.images)},); "
                f"got {self.labels.dtype} of shape {self.labels.shape}"
            )
        if len(self.labels) and int(self.labels.min()) < 0:
            raise DataError("labels must be 0 or larger; leave them out for unlabelled images")
        if len(self.labels) and int(self.labels.max()) >= _MOST_CLASSES:  # bounds the tables with a row per class
            raise DataError(f"labels must be class numbers below {_MOST_CLASSES}; got {int(self.labels.max())}")

    def __len__(self) -> int:
        return len(self.images)

    def fingerprint(self) -> str:
        """Return the sha256 of images and labels, in hexadecimal."""
        digest = hashlib.sha256(repr(self.images.shape).encode())
        for array in (self.images, self.labels):
            if array is not None:
                for start in range(0, len(array), _CHUNK):  # in parts: the array may be memory-mapped
                    digest.update(array[start : start + _CHUNK].tobytes())
        return digest.hexdigest()

    def subset(self, indices: NDArray[np.int64]) -> "ImageData":
        """Return the images at `indices`, in that order."""
        labels, groups = (None if each is None else each[indices] for each in (self.labels, self.groups))
        return replace(self, images=self.images[indices], labels=labels, unreadable=(), groups=groups)


def prepare(data: ImageData, config: DataConfig) -> ImageData:
    """Return images of 8 bits as a run needs them: :func:`through_window`, then :func:`conform`. Raises DataError.

    Registered and public data sets are prepared like this.
    """
    return conform(through_window(data, config.window), config)


def through_window(data: ImageData, window: WindowConfig | None) -> ImageData:
    """Return images of 8 bits through a window. Raises DataError if the window has values that they cannot have."""
    if window is None:
        return data
    if (refusal := window.refusal_of_8_bits()) is not None:
        raise DataError(f"the images have 8 bits per value: {refusal}")
    return replace(data, images=window_arrays(data.images, window))


def conform(data: ImageData, config: DataConfig) -> ImageData:
    """Return the images with the size and the number of channels that the run asks for.

    The shorter side is scaled to `config.image_size` and the middle is cut out. One channel is repeated three times;
    three channels are converted to their luma. Images that already fit are returned without a copy.

    Raises DataError for any other two numbers of channels.
    """
    _, channels, height, width = data.images.shape
    if (channels, height, width) == (config.channels, config.image_size, config.image_size):
        return data
    if channels != config.channels and not {channels, config.channels} <= {1, 3}:
        raise DataError(
            f"the images have {channels} channels, and the run needs {config.channels} (data.channels): only grey and "
            "RGB images are converted to each other"
        )
    out = np.empty((len(data), config.channels, config.image_size, config.image_size), data.images.dtype)
    full = FULL[out.dtype]
    for start in range(0, len(data), _CHUNK):
        chunk = torch.from_numpy(np.array(data.images[start : start + _CHUNK])).to(torch.float32)
        chunk = square(_with_channels(chunk, config.channels), config.image_size)
        out[start : start + _CHUNK] = chunk.round().clamp_(0, full).numpy().astype(out.dtype)
    return replace(data, images=out)


def _with_channels(x_BCHW: Tensor, channels: int) -> Tensor:
    if x_BCHW.shape[1] == channels:
        return x_BCHW
    if channels == 3:
        return x_BCHW.expand(-1, 3, -1, -1)
    return (x_BCHW * x_BCHW.new_tensor(_LUMA).view(1, 3, 1, 1)).sum(dim=1, keepdim=True)


def square(x_BCHW: Tensor, size: int) -> Tensor:
    """Return the middle squares of images whose shorter side was scaled to `size`."""
    height, width = x_BCHW.shape[-2:]
    shorter = min(height, width)
    if shorter != size:
        height, width = (max(size, round(side * size / shorter)) for side in (height, width))
        x_BCHW = F.interpolate(x_BCHW, (height, width), mode="bilinear", antialias=True, align_corners=False)
    top, left = (height - size) // 2, (width - size) // 2
    return x_BCHW[..., top : top + size, left : left + size]


def with_common_classes(images: Iterable[ImageData]) -> list[ImageData]:
    """Return sets of images whose labels have the same meaning: the classes are numbered in the order of all names.

    If a set has no labels, or no names of its classes while another has, the labels are left out of all sets.
    """
    sets = list(images)
    if all(each.labels is not None and not each.class_names for each in sets):
        return sets
    if any(each.labels is None or not each.class_names for each in sets):
        return [ImageData(each.images, groups=each.groups) for each in sets]
    names = tuple(sorted({name for each in sets for name in each.class_names}))
    numbers = {name: number for number, name in enumerate(names)}
    found = []
    for each in sets:
        own = np.array([numbers[name] for name in each.class_names], np.int64)
        found.append(ImageData(each.images, own[each.labels], names, groups=each.groups))
    return found
