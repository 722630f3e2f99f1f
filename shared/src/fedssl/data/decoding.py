"""Decode image files, many at a time, in bounded memory."""

import logging
import os
import struct
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps

from fedssl.data.images import memory_bytes
from fedssl.data.trees import Tree
from fedssl.errors import DataError

log = logging.getLogger("fedssl.data")

_FORMATS = ("JPEG", "PNG", "BMP", "WEBP")
# What PIL and its plugins raise for damaged files. The error for a decompression bomb derives from Exception directly.
_IMAGE_ERRORS = (OSError, ValueError, TypeError, SyntaxError, LookupError, ArithmeticError, EOFError, struct.error,
                 Image.DecompressionBombError)  # fmt: skip
_GREY = ("1", "L", "LA")
_SIXTEEN_BITS = ("I;16", "I;16L", "I;16B", "I;16N")  # grey too
_CHUNK_IMAGES, _CHUNK_BYTES = 1024, 32 << 20
_MAX_THREADS = 16
# PIL releases the GIL while it decodes; for smaller images, switching threads costs more than it gains.
_THREADS_FROM_PIXELS = 128 * 128
_NUM_REPORTS = 20


@dataclass(frozen=True, slots=True)
class ImageFiles:
    """Images that are stored as files and not decoded yet.

    Attributes:
        title: their name in messages.
        tree: the folder or archive that holds them.
        names: the files, in the order of the images.
        labels: int64 class numbers (N,), or None.
        class_names: the classes by number.
    """

    title: str
    tree: Tree
    names: tuple[str, ...]
    labels: NDArray[np.int64] | None = None
    class_names: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.names)


def shape_of_first(files: ImageFiles, image_size: int | None, channels: int | None) -> tuple[int, int]:
    """Return (channels, size) as given, or those of the first image: its shorter side, and 1 channel if it is grey."""
    with _opened(files, files.names[0]) as first:
        size = image_size if image_size is not None else min(first.size)
        grey = channels == 1 or (channels is None and first.mode in (*_GREY, *_SIXTEEN_BITS))
    return 1 if grey else 3, size


def decode_chunks(files: ImageFiles, channels: int, size: int) -> Iterator[NDArray[np.uint8]]:
    """Yield all images in order, as arrays (n, channels, size, size) of at most some tens of megabytes.

    The shorter side is scaled to `size` and the middle is cut out. Progress is logged to `fedssl.data`.

    Raises:
        DataError: an image cannot be decoded; the message names it.
    """
    step = max(1, min(_CHUNK_IMAGES, _CHUNK_BYTES // (channels * size * size)))
    threads = _num_threads(files)
    reported = 0
    with ThreadPoolExecutor(threads) as pool:
        pending: deque[Future[NDArray[np.uint8]]] = deque()
        try:
            for start in range(0, len(files), step):
                pending.append(pool.submit(_decode_some, files, files.names[start : start + step], channels, size))
                if len(pending) > 2 * threads:
                    yield pending.popleft().result()
                if start * _NUM_REPORTS >= (reported + 1) * len(files):
                    reported = start * _NUM_REPORTS // len(files)
                    log.info("decoding %s: %s of %s images", files.title, f"{start:,}", f"{len(files):,}")
            while pending:
                yield pending.popleft().result()
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def decode_to_memory(files: ImageFiles, channels: int, size: int) -> NDArray[np.uint8]:
    """Return all images, (N, channels, size, size). Raises DataError."""
    needed, memory = len(files) * channels * size * size, memory_bytes()
    if needed > memory:
        raise DataError(
            f"the images of {files.title} take {needed / 1e9:,.1f} GB at {size} x {size} pixels, but this machine has "
            f"{memory / 1e9:,.1f} GB of memory: take a smaller image size, or fewer images"
        )
    images = np.empty((len(files), channels, size, size), np.uint8)
    start = 0
    for chunk in decode_chunks(files, channels, size):
        images[start : start + len(chunk)] = chunk
        start += len(chunk)
    return images


def _num_threads(files: ImageFiles) -> int:
    with _opened(files, files.names[0]) as first:
        width, height = first.size
    small = width * height < _THREADS_FROM_PIXELS
    return 1 if small else min(_MAX_THREADS, len(os.sched_getaffinity(0)))


def _decode_some(files: ImageFiles, names: tuple[str, ...], channels: int, size: int) -> NDArray[np.uint8]:
    images = np.empty((len(names), channels, size, size), np.uint8)
    mode = "L" if channels == 1 else "RGB"
    for row, name in zip(images, names, strict=True):
        pixels = _decode(files, name, mode, size)
        row[:] = pixels[np.newaxis] if mode == "L" else pixels.transpose(2, 0, 1)
    return images


def _opened(files: ImageFiles, name: str) -> Image.Image:
    try:
        return Image.open(files.tree.open(name), formats=_FORMATS)
    except _IMAGE_ERRORS as error:
        raise _damaged(files, name, error) from error


def _decode(files: ImageFiles, name: str, mode: str, size: int) -> NDArray[np.uint8]:
    with _opened(files, name) as image:
        try:
            # The EXIF data of photographs records their orientation.
            upright = _in_bytes(ImageOps.exif_transpose(image)).convert(mode)
        except _IMAGE_ERRORS as error:
            raise _damaged(files, name, error) from error
    if upright.size != (size, size):
        upright = ImageOps.fit(upright, (size, size), method=Image.Resampling.BILINEAR)
    return np.asarray(upright, np.uint8)


def _in_bytes(image: Image.Image) -> Image.Image:
    """Return the image with values of 8 bits. PIL's own conversion would turn every value above 255 white."""
    if image.mode in _SIXTEEN_BITS:
        return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    if image.mode in ("I", "F"):
        raise ValueError("the range of its values is unknown; save it with 8 bits, which sets black and white")
    return image


def _damaged(files: ImageFiles, name: str, error: Exception) -> DataError:
    path: Path = files.tree.path / name
    return DataError(f"cannot decode {path}: {error}; repair the image or remove it")
