"""Describe a folder of images before anything is trained on it: what `fedssl data check` reports.

Every image is decoded once. Only its shape, a few of its values and a digest are kept.
"""

import hashlib
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from fedssl.cores import num_usable_cores
from fedssl.data.contents import readable
from fedssl.data.decode_file import Damaged, examine, read_values
from fedssl.data.image_cache.build import expected_bytes
from fedssl.data.image_files import ImageFiles
from fedssl.data.windowing import as_float, prepared_type, require_finite
from fedssl.protocol.data import DataConfig, channels_in_words

T = TypeVar("T")

NUM_BINS = 32
_MOST_VALUES = 1 << 22  # of all images together: 16 MB
_PERCENTILES = (0, 0.5, 50, 99.5, 100)


@dataclass(frozen=True, slots=True)
class Histogram:
    """How often values occur, in a sample of the values of all images.

    Attributes:
        edges: of the bins, ascending; there is one more than bins.
        counts: of the sampled values in each bin.
        percentiles: the values at 0, 0.5, 50, 99.5 and 100 % of the sample.
    """

    edges: tuple[float, ...]
    counts: tuple[int, ...]
    percentiles: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Survey:
    """A description of a folder of images. Names are readable text.

    Attributes:
        num_images: the number of listed images, including those that cannot be read.
        decoded: how many of them were decoded: all, or a sample.
        sizes: how many images have each (width, height).
        kinds: how many images have each number of channels and bits, in words.
        num_deep: how many images have more than 8 bits.
        histograms: of the images of 8 bits and of those of more, by "8 bits" and "more than 8 bits".
        unreadable: names and reasons.
        constant: images of one value.
        duplicates: images with the pixels of an earlier one, and that one.
        classes: the number of listed images of each class; empty without labels.
        num_groups: the number of patients, if the files name them, or None.
        channels: the most frequent number of channels; 1 if nothing could be decoded.
    """

    num_images: int
    decoded: int
    sizes: dict[tuple[int, int], int]
    kinds: dict[str, int]
    num_deep: int
    histograms: dict[str, Histogram]
    unreadable: list[tuple[str, str]]
    constant: list[str]
    duplicates: list[tuple[str, str]]
    classes: dict[str, int]
    num_groups: int | None
    channels: int


@dataclass(frozen=True, slots=True)
class _Seen:
    """One decoded image: its shape, some of its values, and a digest of all of them."""

    size: tuple[int, int]
    channels: int
    kind: str
    is_deep: bool
    is_constant: bool
    digest: bytes
    values: NDArray[np.floating]


@dataclass(slots=True)
class _Tally:
    """The sum of all images that were decoded so far."""

    sizes: Counter[tuple[int, int]] = field(default_factory=Counter)
    kinds: Counter[str] = field(default_factory=Counter)
    channels: Counter[int] = field(default_factory=Counter)
    num_deep: int = 0
    values: dict[str, list[NDArray[np.floating]]] = field(default_factory=dict)
    constant: list[str] = field(default_factory=list)
    duplicates: list[tuple[str, str]] = field(default_factory=list)
    first: dict[bytes, str] = field(default_factory=dict)

    def add(self, name: str, seen: _Seen) -> None:
        self.sizes[seen.size] += 1
        self.kinds[seen.kind] += 1
        self.channels[seen.channels] += 1
        self.num_deep += seen.is_deep
        self.values.setdefault("more than 8 bits" if seen.is_deep else "8 bits", []).append(seen.values)
        if seen.is_constant:
            self.constant.append(name)
        elif (earlier := self.first.setdefault(seen.digest, name)) != name:
            self.duplicates.append((name, earlier))


def survey(files: ImageFiles, names: Sequence[str], on_image: Callable[[int], None] = lambda count: None) -> Survey:
    """Decode some images of a folder, and describe them and the folder.

    Args:
        files: the folder.
        names: the images to decode: all of `files`, or a sample.
        on_image: called with the number of images that were decoded.
    """
    tally, unreadable = _Tally(), []
    for count, (name, seen) in enumerate(zip(names, _each(files, names), strict=True), 1):
        if isinstance(seen, _Seen):
            tally.add(readable(name), seen)
        else:
            unreadable.append((readable(name), seen))
        on_image(count)
    return Survey(
        num_images=len(files),
        decoded=len(names),
        sizes=dict(tally.sizes.most_common()),
        kinds=dict(tally.kinds.most_common()),
        num_deep=tally.num_deep,
        histograms={kind: _histogram(np.concatenate(values)) for kind, values in sorted(tally.values.items())},
        unreadable=unreadable,
        constant=tally.constant,
        duplicates=tally.duplicates,
        classes=_class_counts(files),
        num_groups=None if files.groups is None else len(np.unique(files.groups)),
        channels=max(tally.channels, key=lambda number: tally.channels[number], default=1),
    )


def spread(items: Sequence[T], most: int) -> list[T]:
    """Return at most `most` items, spread evenly.

    >>> spread("abcdefghij", 4)
    ['a', 'c', 'f', 'h']
    """
    taken = min(len(items), most)
    return [items[position * len(items) // taken] for position in range(taken)]


def memory_of(data: DataConfig, num_images: int) -> int:
    """Return how many bytes the images of a run take in a worker's memory, as squares of the run's size."""
    return num_images * data.channels * data.image_size**2 * prepared_type(data.window).itemsize


def cache_of(files: ImageFiles, data: DataConfig) -> int | None:
    """Return about how many bytes the images take in the cache of a run, or None if it has none."""
    return None if data.cache_size is None else expected_bytes(files, files.names, data)


def _each(files: ImageFiles, names: Sequence[str]) -> Iterator[_Seen | str]:
    """Yield what was seen of each image, in order, or why it cannot be decoded."""
    num_values = max(16, _MOST_VALUES // max(1, len(names)))

    def see(name: str) -> _Seen | str:
        try:
            return _see(files, name, num_values)
        except Damaged as error:
            return error.why

    threads = num_usable_cores()
    with ThreadPoolExecutor(threads) as pool:
        for start in range(0, len(names), 64 * threads):
            yield from pool.map(see, names[start : start + 64 * threads])


def _see(files: ImageFiles, name: str, num_values: int) -> _Seen:
    try:
        raster = read_values(files, name)
    except Damaged:
        found = examine(files, name)  # a file of 16 bits may be readable in its upper 8; otherwise it is damaged
        kind = f"{found.mode} of {found.num_bits} bits; only 8 bits are read"
        return _Seen(found.size, 3, kind, False, False, name.encode(errors="surrogateescape"), np.empty(0, np.float32))
    values = raster.values
    try:
        require_finite(values)
    except ValueError as error:
        raise Damaged(files.tree.path / name, str(error)) from error
    height, width, channels = values.shape
    bits = raster.bits or 8 * values.dtype.itemsize
    digest = hashlib.blake2b(repr((values.shape, values.dtype.str)).encode(), digest_size=16)
    digest.update(np.ascontiguousarray(values).data)
    flat = values.reshape(-1)
    some = as_float(flat[:: _step(flat.size, num_values, width * channels)])
    floating = ", floating-point" * (values.dtype.kind == "f")
    return _Seen(
        (width, height),
        channels,
        f"{channels_in_words(channels)} of {bits} bits{floating}",
        values.dtype != np.uint8,
        bool(values.min() == values.max()),
        digest.digest(),
        some,
    )


def _step(size: int, num_values: int, row: int) -> int:
    """Return the step between the values of a sample: about `num_values` of `size` values, in rows of `row` values.

    It has no common factor with a row. Otherwise the sample could be of only one channel or one column of pixels.

    >>> _step(224 * 224 * 3, 4194, 224 * 3)
    37
    """
    step = max(1, -(-size // num_values))
    while math.gcd(step, row) > 1:
        step += 1
    return step


def _histogram(values: NDArray[np.floating]) -> Histogram:
    if not values.size:
        return Histogram((0.0, 1.0), (0,), (0.0,) * len(_PERCENTILES))
    halves = values.astype(np.float64) / 2  # whose differences are never infinite
    counts, edges = np.histogram(halves, NUM_BINS)
    percentiles = np.percentile(halves, _PERCENTILES)
    return Histogram(tuple((2 * edges).tolist()), tuple(counts.tolist()), tuple((2 * percentiles).tolist()))


def _class_counts(files: ImageFiles) -> dict[str, int]:
    if files.labels is None:
        return {}
    counts = np.bincount(files.labels, minlength=len(files.class_names))
    return dict(zip(files.class_names, counts.tolist(), strict=True))
