"""Decode image files, many at a time, in bounded memory."""

import logging
import math
import os
import struct
from collections import deque
from collections.abc import Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import ExifTags, Image, ImageOps

from fedssl.data.contents import Contents, readable
from fedssl.data.images import memory_bytes
from fedssl.data.trees import Tree
from fedssl.errors import DataError

log = logging.getLogger("fedssl.data")

_FORMATS = ("JPEG", "PNG", "BMP", "WEBP", "TIFF")
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
_MAX_DAMAGED = 10  # decoding stops there: the rest is not needed to see what is wrong

LEAST_HIGHEST = 1 << 14
"""If no image of 16 bits in a set has a value as high as this, its values have fewer bits than their files."""


@dataclass(frozen=True, slots=True)
class ImageFiles:
    """Images that are stored as files and not decoded yet.

    Attributes:
        title: their name in messages.
        tree: the folder or archive that holds them.
        names: the files, in the order of the images.
        labels: int64 class numbers (N,), or None.
        class_names: the classes by number.
        contents: what the folder holds besides them, if it was searched for images.
    """

    title: str
    tree: Tree
    names: tuple[str, ...]
    labels: NDArray[np.int64] | None = None
    class_names: tuple[str, ...] = ()
    contents: Contents | None = None

    def __len__(self) -> int:
        return len(self.names)


@dataclass(frozen=True, slots=True)
class Decoded:
    """Some decoded images.

    Attributes:
        images: uint8 (n, C, S, S); those that are damaged are black.
        damaged: the names of the images that cannot be decoded, and why.
        num_deep: how many images have 16 bits per value.
        highest: the highest value of those with 16 bits.
    """

    images: NDArray[np.uint8]
    damaged: list[tuple[str, str]]
    num_deep: int
    highest: int


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
        DataError: an image cannot be decoded, or the values of all images of 16 bits are so low that they would be
            nearly black. It is raised after the last chunk, so that its message names several images.
    """
    step = _images_at_once(channels, size)
    reported = start = 0
    problems = _Problems(files)
    with closing(decode_each(files, channels, size, step)) as parts:
        for part in parts:
            if start * _NUM_REPORTS >= (reported + 1) * len(files):
                reported = start * _NUM_REPORTS // len(files)
                log.info("decoding %s: %s of %s images", files.title, f"{start:,}", f"{len(files):,}")
            yield problems.checked(part)
            start += len(part.images)
    problems.raise_if_any()


def decode_batches(
    files: ImageFiles, channels: int, size: int, batch_size: int, start: int = 0
) -> Generator[list[Decoded]]:
    """Yield the images from position `start` on, in batches of `batch_size`, each in the parts that were decoded.

    Unlike :func:`decode_chunks`, this does not raise an error if an image is damaged: see :class:`Decoded`.
    """
    step = math.gcd(batch_size, 1 << (_images_at_once(channels, size).bit_length() - 1))
    with closing(decode_each(files, channels, size, step, start)) as parts:
        while batch := list(islice(parts, batch_size // step)):
            yield batch


def decode_each(files: ImageFiles, channels: int, size: int, step: int, start: int = 0) -> Generator[Decoded]:
    """Yield the images from position `start` on, `step` at a time, while threads decode the next ones."""
    threads = _num_threads(files)
    with ThreadPoolExecutor(threads) as pool:
        pending: deque[Future[Decoded]] = deque()
        try:
            for first in range(start, len(files), step):
                pending.append(pool.submit(_decode_some, files, files.names[first : first + step], channels, size))
                if len(pending) > 2 * threads:
                    yield pending.popleft().result()
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


@dataclass(frozen=True, slots=True)
class DecodedFile:
    """The contents of an image file: (width, height), PIL's mode, the bits of a value, and its highest value."""

    size: tuple[int, int]
    mode: str
    num_bits: int
    highest: int


def examine(files: ImageFiles, name: str) -> DecodedFile:
    """Decode one image as it is for training, and describe it. Raises DataError if it cannot be decoded."""
    with _opened(files, name) as image:
        size, mode, depth = image.size, image.mode, _num_bits(image)
        _, highest = _upright(files, name, image, "RGB")
    return DecodedFile(size, mode, depth, highest)


def thumbnail(files: ImageFiles, name: str, side: int) -> Image.Image:
    """Return a whole image in RGB, with at most `side` x `side` pixels. Raises DataError if it cannot be decoded."""
    with _opened(files, name) as image:
        upright, _ = _upright(files, name, image, "RGB")
    upright.thumbnail((side, side))
    return upright


def low_range(num_images: int, highest: int) -> str:
    """Return what is wrong with images of 16 bits that have no higher value than this."""
    return (
        f"{num_images:,} images are stored with 16 bits per value, but no value is above {highest:,}, so they hold "
        f"{highest.bit_length()} bits: taken for 0..65,535 they would be nearly black. Convert them to 8 bits, and "
        "choose which values become black and white"
    )


class _Problems:
    """Collects the problems of all images while they are decoded."""

    def __init__(self, files: ImageFiles) -> None:
        self._files = files
        self._damaged: list[tuple[str, str]] = []
        self._num_deep = self._highest = 0

    def checked(self, decoded: Decoded) -> NDArray[np.uint8]:
        """Return the images of a chunk, and remember its problems. Raises DataError if there are many."""
        self._damaged += decoded.damaged
        self._num_deep += decoded.num_deep
        self._highest = max(self._highest, decoded.highest)
        if len(self._damaged) >= _MAX_DAMAGED:
            raise self._error("at least ")
        return decoded.images

    def raise_if_any(self) -> None:
        """Raise DataError if an image is damaged, or if all images of 16 bits are nearly black; log their range."""
        if self._damaged:
            raise self._error("")
        if not self._num_deep or not self._highest:
            return
        if self._highest < LEAST_HIGHEST:
            raise DataError(f"{self._files.title}: {low_range(self._num_deep, self._highest)}")
        log.info(
            "%s: %s images have 16 bits per value. The upper 8 are used: 0..65,535 becomes 0..255 (the "
            "highest value is %s)",
            self._files.title,
            f"{self._num_deep:,}",
            f"{self._highest:,}",
        )

    def _error(self, at_least: str) -> DataError:
        root = self._files.tree.path
        if len(self._damaged) == 1:
            name, why = self._damaged[0]
            return DataError(f"cannot decode {readable(str(root / name))}: {why}; repair the image or remove it")
        named = "; ".join(f"{readable(name)}: {why}" for name, why in self._damaged[:_MAX_DAMAGED])
        return DataError(
            f"cannot decode {at_least}{len(self._damaged):,} of {len(self._files):,} images in {readable(str(root))}: "
            f"{named}; repair these images or remove them"
        )


def _images_at_once(channels: int, size: int) -> int:
    return max(1, min(_CHUNK_IMAGES, _CHUNK_BYTES // (channels * size * size)))


def _num_threads(files: ImageFiles) -> int:
    try:
        with _opened(files, files.names[0]) as first:
            width, height = first.size
    except DataError:
        return 1  # decoding reports it, together with others
    small = width * height < _THREADS_FROM_PIXELS
    return 1 if small else min(_MAX_THREADS, len(os.sched_getaffinity(0)))


def _decode_some(files: ImageFiles, names: tuple[str, ...], channels: int, size: int) -> Decoded:
    images = np.zeros((len(names), channels, size, size), np.uint8)
    mode = "L" if channels == 1 else "RGB"
    damaged: list[tuple[str, str]] = []
    num_deep = highest = 0
    for row, name in zip(images, names, strict=True):
        try:
            pixels, own_highest = _decode(files, name, mode, size)
        except _Damaged as error:
            damaged.append((name, error.why))
            continue
        if own_highest is not None:
            num_deep, highest = num_deep + 1, max(highest, own_highest)
        row[:] = pixels[np.newaxis] if mode == "L" else pixels.transpose(2, 0, 1)
    return Decoded(images, damaged, num_deep, highest)


class _Damaged(DataError):
    """An image that cannot be decoded, for the reason `why`."""

    def __init__(self, path: Path, why: str) -> None:
        super().__init__(f"cannot decode {readable(str(path))}: {why}; repair the image or remove it")
        self.why = why


def _opened(files: ImageFiles, name: str) -> Image.Image:
    try:
        return Image.open(files.tree.open(name), formats=_FORMATS)
    except _IMAGE_ERRORS as error:
        raise _Damaged(files.tree.path / name, str(error)) from error


def _decode(files: ImageFiles, name: str, mode: str, size: int) -> tuple[NDArray[np.uint8], int | None]:
    """Return an image's pixels, and its highest value if it has 16 bits."""
    with _opened(files, name) as image:
        num_bits = _num_bits(image)
        upright, highest = _upright(files, name, image, mode)
    if upright.size != (size, size):
        upright = ImageOps.fit(upright, (size, size), method=Image.Resampling.BILINEAR)
    return np.asarray(upright, np.uint8), highest if num_bits == 16 else None


def _upright(files: ImageFiles, name: str, image: Image.Image, mode: str) -> tuple[Image.Image, int]:
    """Return the image in 8 bits, turned as its EXIF data require, and its highest value. Raises DataError."""
    num_bits = _num_bits(image)
    try:
        _refuse_tiff(image, num_bits)
        turned = ImageOps.exif_transpose(image)
        if turned.mode in _SIXTEEN_BITS:
            values = np.asarray(turned)
            highest = int(values.max(initial=0))
            turned = Image.fromarray((values >> (num_bits - 8)).astype(np.uint8))
        elif turned.mode in ("I", "F"):
            raise ValueError("the range of its values is unknown; save it with 8 bits, which sets black and white")
        else:  # of colour images with 16 bits, PIL gives the upper 8
            highest = 256 * max(int(high) for _, high in _ranges(turned)) + 255 if num_bits > 8 else 0
        return turned.convert(mode), highest
    except _IMAGE_ERRORS as error:
        raise _Damaged(files.tree.path / name, str(error)) from error


def _num_bits(image: Image.Image) -> int:
    """Return how many bits the file declares for a value: 12, 16, or 8 for all others. Before the image is loaded."""
    raw_modes = str([tile[3] for tile in getattr(image, "tile", ())])
    if "I;12" in raw_modes:
        return 12
    return 16 if ";16" in raw_modes or image.mode in _SIXTEEN_BITS else 8


def _ranges(image: Image.Image) -> list[tuple[float, float]]:
    """Return the lowest and the highest value of each channel of colour or grey, without that of transparency."""
    return [channel.getextrema() for channel in image.split()[: 3 if "RGB" in image.mode else 1]]  # type: ignore[misc]


def _refuse_tiff(image: Image.Image, num_bits: int) -> None:
    """Raise ValueError for TIFF files that PIL would read only in part, or with inverted values."""
    if image.format != "TIFF":
        return
    if (num_pages := getattr(image, "n_frames", 1)) > 1:
        raise ValueError(f"it has {num_pages} pages, and only the first would be read; save each page as a file")
    if num_bits > 8 and getattr(image, "tag_v2", {}).get(ExifTags.Base.PhotometricInterpretation) == 0:
        raise ValueError("it stores inverted values (WhiteIsZero) with 16 bits; save it as BlackIsZero")
