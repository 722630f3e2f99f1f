"""Convert images to and from the data-set files that are registered with a coordinator (`artifacts.images`).

The source is read once, in parts: neither a second copy of it nor the file is ever in memory.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from fedssl.artifacts import images as image_files
from fedssl.artifacts.images import (
    MAX_CLASSES,
    MAX_SIZE,
    MIN_SIZE,
    Choose,
    LabelledShape,
    PublicShape,
    Stream,
    labelled_streams,
    public_streams,
    streams_digest,
    write_streams,
)
from fedssl.data import ImageData, choose_images, conform, load_dataset
from fedssl.data.datasets import file_shape
from fedssl.data.reading import AS_STORED, Reading
from fedssl.errors import DataError
from fedssl.protocol.data import DataConfig

_CHUNK = 2048

Shape = tuple[Literal[1, 3], int]
"""The number of channels, and the height and width in pixels."""

OnImages = Callable[[int], None]
"""Called with the number of images that have been written."""


@dataclass(frozen=True, slots=True)
class ImageSelection:
    """At most `max_images` of a split, drawn by the seed; with None all images, in their order."""

    max_images: int | None = None
    seed: int = 0


def load_own(
    name_or_path: str,
    split: Literal["train", "test"],
    root: Path | None = None,
    *,
    image_size: int | None = None,
    channels: int | None = None,
    reading: Reading = AS_STORED,
) -> ImageData:
    """Call :func:`fedssl.data.load_dataset` for images that are written in their own shape, see :func:`own_shape`.

    Raises DataError, for photographs without an `image_size` before they are decoded.
    """
    if image_size is None and (found := file_shape(name_or_path, split, root, channels, reading)) is not None:
        _require_size(found[1])
    return load_dataset(name_or_path, split, root, image_size=image_size, channels=channels, reading=reading)


def own_shape(images: ImageData, image_size: int | None = None, channels: int | None = None) -> tuple[int, int]:
    """Return the given shape, or the images' own. Raises DataError if they are not square and no size is given."""
    _, own_channels, height, width = images.images.shape
    if image_size is None and height != width:
        raise DataError(f"the images are {height} x {width} pixels: give --image-size to have squares cut out of them")
    size = image_size or height
    _require_size(size)
    return channels or own_channels, size


def registered_shape(images: ImageData, image_size: int | None = None, channels: Literal[1, 3] | None = None) -> Shape:
    """Return :func:`own_shape` for images that are registered with a coordinator.

    Raises DataError also if they are neither grey nor RGB.
    """
    found, size = own_shape(images, image_size, channels)
    if found == 1:
        return 1, size
    if found == 3:
        return 3, size
    raise DataError(f"images of {found} channels cannot be registered with a coordinator: only grey and RGB images")


def _require_size(size: int) -> None:
    if not MIN_SIZE <= size <= MAX_SIZE:
        raise DataError(f"the images are {size} pixels wide: give --image-size, between {MIN_SIZE} and {MAX_SIZE}")


def write_public(
    images: ImageData,
    destination: Path,
    shape: Shape,
    choice: ImageSelection = ImageSelection(),
    on_images: OnImages = lambda count: None,
) -> str:
    """Write a public set without labels, and return the file's sha256. Raises DataError if there are no images."""
    return write_streams(destination, _public_streams(images, shape, choice, on_images))


def has_digest(images: ImageData, digest: str) -> bool:
    """Return whether `digest` is the sha256 of the file that `write_public` makes of all images in their own shape."""
    _, channels, height, width = images.images.shape
    if height != width or not len(images):
        return False
    return streams_digest(_public_streams(images, (1 if channels == 1 else 3, height), ImageSelection())) == digest


def write_labelled(
    train: ImageData,
    test: ImageData,
    destination: Path,
    shape: Shape,
    choices: tuple[ImageSelection, ImageSelection] = (ImageSelection(), ImageSelection()),
    on_images: OnImages = lambda count: None,
) -> str:
    """Write a labelled set and return the file's sha256. `choices` are those of the training and the test images.

    Raises DataError if a split is empty or has no labels.
    """
    if train.labels is None or test.labels is None:
        raise DataError(
            "the images have no labels, which the evaluation of encoders needs: give files with labels, or one folder "
            "per class"
        )
    chosen = tuple(_chosen(len(split), choice) for split, choice in zip((train, test), choices, strict=True))
    labels = (train.labels[chosen[0]], test.labels[chosen[1]])
    if (highest := max(int(part.max()) for part in labels)) >= MAX_CLASSES:
        raise DataError(f"there is a label {highest}: at most {MAX_CLASSES} classes, numbered from 0, are supported")
    channels, size = shape
    streams = labelled_streams(
        LabelledShape(len(chosen[0]), len(chosen[1]), channels, size),
        _parts(train, chosen[0], shape, lambda count: on_images(len(chosen[1]) + count)),
        labels[0],
        _parts(test, chosen[1], shape, on_images),  # the test images come first in the file
        labels[1],
        train.class_names if highest < len(train.class_names) <= MAX_CLASSES else (),
    )
    return write_streams(destination, streams)


def read_public(path: Path, digest: str, choose: Choose = np.arange) -> ImageData:
    """Read the images of a public set that `choose` returns, and compare the file with its digest on the way.

    Raises ArtifactDamaged unless the digest is the file's, and ArtifactError if it is not a public set.
    """
    return ImageData(image_files.read_public(path, digest, choose))


def read_labelled(
    path: Path, digest: str, choices: tuple[ImageSelection, ImageSelection] = (ImageSelection(), ImageSelection())
) -> tuple[ImageData, ImageData]:
    """Read training and test images of a labelled set, as `read_public` does. `choices` are those of the two splits."""
    train, test = (partial(choose_images, max_images=each.max_images, seed=each.seed) for each in choices)
    found = image_files.read_labelled(path, digest, train, test)
    return (
        ImageData(found.train_images, found.train_labels, found.class_names),
        ImageData(found.test_images, found.test_labels, found.class_names),
    )


def _public_streams(
    images: ImageData, shape: Shape, choice: ImageSelection, on_images: OnImages = lambda count: None
) -> list[Stream]:
    chosen = _chosen(len(images), choice)
    return public_streams(PublicShape(len(chosen), *shape), _parts(images, chosen, shape, on_images))


def _chosen(num_images: int, choice: ImageSelection) -> NDArray[np.int64]:
    if not num_images:
        raise DataError("there are no images to register: give a folder, an .npz file or a data set's name")
    return choose_images(num_images, choice.max_images, choice.seed)


def _parts(
    images: ImageData, chosen: NDArray[np.int64], shape: Shape, on_images: OnImages
) -> Iterator[NDArray[np.uint8]]:
    channels, size = shape
    config = DataConfig(channels=channels, image_size=size)
    for start in range(0, len(chosen), _CHUNK):
        part = chosen[start : start + _CHUNK]
        pixels = conform(ImageData(images.images[part]), config).images
        if pixels.dtype != np.uint8:
            raise DataError("images of 16 bits cannot be registered with a coordinator: save them with 8 bits")
        yield pixels.astype(np.uint8, copy=False)
        on_images(start + len(part))
