"""The statistics of a data card (`fedssl.protocol.data_card`), from all images of a data set."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedssl.data.datasets import list_files, load_arrays
from fedssl.data.decode_file import Damaged, read_values, release
from fedssl.data.rasters import Raster
from fedssl.data.windowing import with_channels
from fedssl.protocol.data import WindowConfig
from fedssl.protocol.data_card import NUM_BINS, SIZE_BOUNDS, ChannelSums, DataCard, suppressed

_DECLARED, _OWN = WindowConfig(stored=True), WindowConfig(percentiles=(0, 100))


@dataclass(frozen=True, slots=True)
class ImageStatistics:
    """The values that a card counts, per readable image.

    Attributes:
        sizes: bins of the shorter sides (N,).
        channels: numbers of channels (N,).
        shares: how the values are distributed over the bins of intensity (N, 10).
        means, squares: the mean, and the mean square, of each channel in 0..1 (N, C); None if an image has more than 8
            bits, because its pixels then depend on a run's window, or cannot be converted to C channels.
        groups: group numbers (N,), or None.
    """

    sizes: NDArray[np.int64]
    channels: NDArray[np.int64]
    shares: NDArray[np.float64]
    means: NDArray[np.float64] | None
    squares: NDArray[np.float64] | None
    groups: NDArray[np.int64] | None

    @property
    def num_units(self) -> int:
        """Return the number of groups, or, without groups, of images."""
        return _num_units(self, np.ones(len(self.sizes), bool))

    @property
    def fingerprint(self) -> str:
        """Return a digest of the values, in which the order of the images does not matter."""
        rows = np.column_stack([self.sizes, self.channels, self.shares])
        return hashlib.sha256(b"".join(sorted(row.tobytes() for row in rows))).hexdigest()


def measure(name_or_path: str, channels: int, groups: NDArray[np.int64] | None = None) -> ImageStatistics:
    """Decode all training images, one at a time, and measure them. Raises DataError.

    Args:
        name_or_path: the data set. Files that cannot be read are left out.
        channels: C, to which grey and RGB images are converted for the means.
        groups: of all listed images; None for those of the files, if they have any.
    """
    own_groups, rasters = _rasters(name_or_path)
    groups = own_groups if groups is None else groups
    positions, sizes, found, shares, moments = [], [], [], [], []
    for position, raster in rasters:
        try:
            unit_HWC = raster.unit(_window_for(raster))
        except ValueError:
            continue  # values that are not numbers
        positions.append(position)
        sizes.append(int(np.searchsorted(SIZE_BOUNDS, min(raster.values.shape[:2]), side="right")))
        found.append(raster.values.shape[2])
        shares.append(np.histogram(unit_HWC, NUM_BINS, (0, 1))[0] / unit_HWC.size)
        moments.append(_moments(raster, unit_HWC, channels))
    usable = [each for each in moments if each is not None]
    complete = len(usable) == len(moments) > 0
    return ImageStatistics(
        np.array(sizes, np.int64),
        np.array(found, np.int64),
        np.array(shares, np.float64).reshape(-1, NUM_BINS),
        np.stack([mean for mean, _ in usable]) if complete else None,
        np.stack([square for _, square in usable]) if complete else None,
        None if groups is None else groups[positions],
    )


def card_of(found: ImageStatistics, min_count: int) -> DataCard | None:
    """Return the card, or None if there are fewer images, or groups, than `min_count`."""
    num_images = len(found.sizes)
    if found.num_units < min_count:
        return None
    num_groups = None if found.groups is None else len(np.unique(found.groups))
    has_value = [_num_units(found, found.shares[:, each] > 0) for each in range(NUM_BINS)]
    shown = suppressed(has_value, has_value, min_count)
    means = found.shares.mean(axis=0)
    return DataCard(
        min_count=min_count,
        num_images=num_images,
        num_groups=num_groups,
        sizes=_counts(found, found.sizes, range(len(SIZE_BOUNDS) + 1), min_count),
        channels=_counts(found, found.channels, range(1, 17), min_count),
        histogram=tuple(
            None if units is None else round(float(mean), 6) for units, mean in zip(shown, means, strict=True)
        ),
    )


def sums_of(found: ImageStatistics, min_count: int) -> ChannelSums | None:
    """Return the sums, or None if fewer than `min_count` images or groups exist, or an image has more than 8 bits."""
    if found.means is None or found.squares is None:
        return None
    if found.num_units < min_count:
        return None
    return ChannelSums(
        num_images=len(found.means),
        means=tuple(found.means.sum(axis=0).tolist()),
        squares=tuple(found.squares.sum(axis=0).tolist()),
    )


def _rasters(name_or_path: str) -> tuple[NDArray[np.int64] | None, Iterator[tuple[int, Raster]]]:
    """Return the groups, and an iterator over each readable image with its position."""
    if (files := list_files(name_or_path, "train")) is None:
        stored = load_arrays(name_or_path, "train")
        return stored.groups, (
            (number, Raster(pixels.transpose(1, 2, 0), None)) for number, pixels in enumerate(stored.pixels)
        )

    def decoded() -> Iterator[tuple[int, Raster]]:
        for number, name in enumerate(files.names):
            try:
                raster = read_values(files, name)
            except Damaged:
                continue
            yield number, raster
        release()

    return files.groups, decoded()


def _window_for(raster: Raster) -> WindowConfig | None:
    if raster.values.dtype == np.uint8:
        return None
    return _OWN if raster.declared is None else _DECLARED


def _moments(
    raster: Raster, unit_HWC: NDArray[np.float32], channels: int
) -> tuple[NDArray[np.float64], NDArray[np.float64]] | None:
    if raster.values.dtype != np.uint8:
        return None
    try:
        pixels = with_channels(unit_HWC, channels).astype(np.float64)
    except ValueError:
        return None
    return pixels.mean(axis=(0, 1)), (pixels**2).mean(axis=(0, 1))


def _counts(found: ImageStatistics, values: NDArray[np.int64], kinds: range, min_count: int) -> tuple[int | None, ...]:
    counts = [int((values == kind).sum()) for kind in kinds]
    return tuple(suppressed(counts, [_num_units(found, values == kind) for kind in kinds], min_count))


def _num_units(found: ImageStatistics, chosen: NDArray[np.bool_]) -> int:
    """Return the number of groups of some images, or, without groups, of the images."""
    return int(chosen.sum()) if found.groups is None else len(np.unique(found.groups[chosen]))
