"""Decode image files, many at a time, in bounded memory."""

import logging
import math
from collections import deque
from collections.abc import Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from itertools import islice

import numpy as np

from fedssl.cores import num_usable_cores
from fedssl.data.array_files import memory_bytes
from fedssl.data.contents import readable
from fedssl.data.decode_file import Damaged, decode_file, release, size_of
from fedssl.data.image_files import ImageFiles
from fedssl.data.trees import is_loaded_as_a_whole
from fedssl.data.windowing import NEEDS_WINDOW, Pixels, WindowMissing, prepared_type
from fedssl.errors import DataError
from fedssl.wording import plural

log = logging.getLogger("fedssl.data")

_CHUNK_IMAGES, _CHUNK_BYTES = 1024, 32 << 20
_MAX_THREADS = 16
# PIL releases the GIL while it decodes; for smaller images, switching threads costs more than it gains.
_THREADS_FROM_PIXELS = 128 * 128
_NUM_REPORTS = 20
_MAX_DAMAGED = 10  # decoding stops after this many: the rest is not needed to see what is wrong

LEAST_HIGHEST = 1 << 14
"""If no image of 16 bits in a set has a value as high as this, its values have fewer bits than their files."""


@dataclass(frozen=True, slots=True)
class Decoded:
    """Some decoded images.

    Attributes:
        images: (n, C, S, S); those that are damaged are black.
        damaged: the names of the images that cannot be decoded, and why.
        num_deep: how many images have 16 bits per value.
        highest: the highest value of those with 16 bits.
    """

    images: Pixels
    damaged: list[tuple[str, str]]
    num_deep: int
    highest: int


def decode_chunks(files: ImageFiles, channels: int, size: int) -> Iterator[Pixels]:
    """Yield all images in order, as arrays (n, channels, size, size) of at most some tens of megabytes.

    The shorter side is scaled to `size` and the middle is cut out. Progress is logged to `fedssl.data`.

    Raises:
        DataError: an image cannot be decoded, or the values of all images of 16 bits are so low that they would be
            nearly black. It is raised after the last chunk, so that its message names several images.
    """
    for part in _decode_checked(files, channels, size, num_tolerated=0):
        yield part.images


def _decode_checked(files: ImageFiles, channels: int, size: int, num_tolerated: int) -> Iterator[Decoded]:
    """Do the same, but report up to `num_tolerated` damaged images in place of raising an error."""
    step = _images_at_once(channels, size)
    reported = start = 0
    problems = Problems(files, num_tolerated)
    with closing(decode_each(files, channels, size, step)) as parts:
        for part in parts:
            if start * _NUM_REPORTS >= (reported + 1) * len(files):
                reported = start * _NUM_REPORTS // len(files)
                log.info("decoding %s: %s of %s images", files.title, f"{start:,}", f"{len(files):,}")
            problems.add(part)
            yield part
            start += len(part.images)
    problems.finish()


def decode_batches(
    files: ImageFiles, channels: int, size: int, batch_size: int, start: int
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
            release()


def decode_to_memory(files: ImageFiles, channels: int, size: int) -> tuple[Pixels, tuple[int, ...]]:
    """Return all readable images, (N, channels, size, size), and the sorted positions of the unreadable files.

    Raises DataError if more files are unreadable than `files.reading` tolerates.
    """
    dtype = prepared_type(files.reading.window)
    needed, memory = len(files) * channels * size * size * dtype.itemsize, memory_bytes()
    if needed > memory:
        raise DataError(
            f"the images of {files.title} take {needed / 1e9:,.1f} GB at {size} x {size} pixels, but this machine has "
            f"{memory / 1e9:,.1f} GB of memory: take a smaller image size, or fewer images"
        )
    images = np.empty((len(files), channels, size, size), dtype)
    position_of = {name: position for position, name in enumerate(files.names)}
    unreadable: list[int] = []
    start = seen = 0
    for part in _decode_checked(files, channels, size, files.num_tolerated):
        lost = [position_of[name] for name, _ in part.damaged]
        kept = np.delete(part.images, np.subtract(lost, seen), axis=0) if lost else part.images
        images[start : start + len(kept)] = kept
        start += len(kept)
        seen += len(part.images)
        unreadable += lost
    return images[:start], tuple(unreadable)


def find_unreadable(files: ImageFiles, channels: int, size: int) -> tuple[int, ...]:
    """Decode all images without keeping them. Return the sorted positions of the unreadable files.

    Raises DataError if more files are unreadable than `files.reading` tolerates.
    """
    position_of = {name: position for position, name in enumerate(files.names)}
    parts = _decode_checked(files, channels, size, files.num_tolerated)
    return tuple(position_of[name] for part in parts for name, _ in part.damaged)


def low_range(num_images: int, highest: int) -> str:
    """Return what is wrong with images of 16 bits that have no higher value than this."""
    images = plural(num_images, "image is", "images are")
    bits = plural(highest.bit_length(), "bit")
    return (
        f"{images} stored with 16 bits per value, but no value is above {highest:,}, so the values have {bits}: "
        "taken for 0..65,535 they would be nearly black. "
        f"{NEEDS_WINDOW[0].upper()}{NEEDS_WINDOW[1:]}, or convert the images to 8 bits"
    )


class Problems:
    """Collects the problems of all images while they are decoded; `num_tolerated` of them may be unreadable."""

    def __init__(self, files: ImageFiles, num_tolerated: int) -> None:
        self._files = files
        self._num_tolerated = num_tolerated
        self._damaged: list[tuple[str, str]] = []
        self._num_deep = self._highest = 0

    def add(self, decoded: Decoded) -> None:
        """Remember the problems of a chunk. Raises DataError if there are many."""
        self._damaged += decoded.damaged
        self._num_deep += decoded.num_deep
        self._highest = max(self._highest, decoded.highest)
        if len(self._damaged) >= _MAX_DAMAGED and self._are_too_many:
            raise self._error("at least ")

    @property
    def _are_too_many(self) -> bool:
        # The window is missing in the spec, and leaving the files out would hide that.
        return len(self._damaged) > self._num_tolerated or any(NEEDS_WINDOW in why for _, why in self._damaged)

    def finish(self) -> None:
        """Raise DataError if too many images are damaged, or if all of 16 bits are nearly black; log the rest."""
        if self._damaged and self._are_too_many:
            raise self._error("")
        if self._damaged:
            log.warning(
                "%s: left out %s of %s images, which cannot be read (at most %s may be, by max_unreadable): %s",
                self._files.title,
                f"{len(self._damaged):,}",
                f"{len(self._files):,}",
                f"{self._num_tolerated:,}",
                self._named(),
            )
        if not self._num_deep or not self._highest:
            return
        if self._highest < LEAST_HIGHEST:
            raise WindowMissing(f"{self._files.title}: {low_range(self._num_deep, self._highest)}")
        log.info(
            "%s: %s images have 16 bits per value. The upper 8 are used: 0..65,535 becomes 0..255 (the "
            "highest value is %s)",
            self._files.title,
            f"{self._num_deep:,}",
            f"{self._highest:,}",
        )

    def _error(self, at_least: str) -> DataError:
        root = self._files.tree.path
        kind = WindowMissing if any(NEEDS_WINDOW in why for _, why in self._damaged) else DataError
        if len(self._damaged) == 1:
            name, why = self._damaged[0]
            return kind(f"cannot decode {readable(str(root / name))}: {why}; repair the image or remove it")
        return kind(
            f"cannot decode {at_least}{len(self._damaged):,} of {len(self._files):,} images in {readable(str(root))}: "
            f"{self._named()}; repair these images or remove them{self._limit()}"
        )

    def _named(self) -> str:
        return "; ".join(f"{readable(name)}: {why}" for name, why in self._damaged[:_MAX_DAMAGED])

    def _limit(self) -> str:
        share = self._files.reading.max_unreadable
        return f" (at most {100 * share:g} % may be unreadable, by max_unreadable)" if self._num_tolerated else ""


def _images_at_once(channels: int, size: int) -> int:
    return max(1, min(_CHUNK_IMAGES, _CHUNK_BYTES // (channels * size * size)))


def _num_threads(files: ImageFiles) -> int:
    if any(is_loaded_as_a_whole(name) for name in files.names):  # threads that read two files would load them in turns
        return 1
    for name in files.names[: 1 + files.num_tolerated]:
        try:
            width, height = size_of(files, name)
            break
        except DataError:
            continue
    else:
        return 1  # decoding reports it, together with others
    small = width * height < _THREADS_FROM_PIXELS
    return 1 if small else min(_MAX_THREADS, num_usable_cores())


def _decode_some(files: ImageFiles, names: tuple[str, ...], channels: int, size: int) -> Decoded:
    images = np.zeros((len(names), channels, size, size), prepared_type(files.reading.window))
    damaged: list[tuple[str, str]] = []
    num_deep = highest = 0
    for row, name in zip(images, names, strict=True):
        try:
            row[:], own_highest = decode_file(files, name, channels, size)
        except Damaged as error:
            damaged.append((name, error.why))
            continue
        if own_highest is not None:
            num_deep, highest = num_deep + 1, max(highest, own_highest)
    return Decoded(images, damaged, num_deep, highest)
