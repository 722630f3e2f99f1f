"""The federated data card: statistics of a site's images as a whole, if its owner allows them.

A worker sends it after its registration, and only what the owner's policy allows by rules for `statistics` and
`channel-sums`. There are no other statistics.
"""

from typing import Annotated

from pydantic import Field, model_validator

from fedssl.protocol.base import StrictModel
from fedssl.protocol.data import Channels

SIZE_BOUNDS = (32, 64, 128, 256, 512, 1024, 2048)
"""The shorter sides, in pixels, from which the second to the last bin of sizes begin."""

NUM_BINS = 10
"""Bins of equal width between black and white."""

DRIFT_ALARM = 0.2
"""The total variation distance to the federation's mean histogram from which a site's images are an alarm."""

Shown = Annotated[int, Field(strict=True, ge=0, le=10**9)] | None
"""A number of images. Null: suppressed."""

Share = Annotated[float, Field(ge=0, le=1)] | None


class DataCard(StrictModel):
    """Statistics of a site's images. A number of fewer than `min_count` images, or groups, is suppressed (null)."""

    min_count: int = Field(ge=1, le=10**9, description="From the data owner's policy.")
    num_images: int = Field(strict=True, ge=1, le=10**9)
    num_groups: Shown = Field(description="Patients, for example. Null: too few, or the images have no groups.")
    sizes: tuple[Shown, ...] = Field(
        min_length=len(SIZE_BOUNDS) + 1,
        max_length=len(SIZE_BOUNDS) + 1,
        description="Images whose shorter side is below 32, 64, 128, 256, 512, 1024, 2048 pixels, and larger ones.",
    )
    channels: tuple[Shown, ...] = Field(min_length=16, max_length=16, description="Images with 1, 2, ... 16 channels.")
    histogram: tuple[Share, ...] = Field(
        min_length=NUM_BINS,
        max_length=NUM_BINS,
        description="Mean over the images of the share of values in each tenth between black and white: of 8 bits, of "
        "the range that a file declares, or else between the image's lowest and highest value.",
    )


class ChannelSums(StrictModel):
    """Sums over a site's images of the mean, and of the mean square, of each channel's pixels in 0..1."""

    num_images: int = Field(strict=True, ge=1, le=10**9)
    means: tuple[Annotated[float, Field(ge=0, le=1e9)], ...] = Field(min_length=1, max_length=16)
    squares: tuple[Annotated[float, Field(ge=0, le=1e9)], ...] = Field(min_length=1, max_length=16)

    @model_validator(mode="after")
    def _fit(self) -> "ChannelSums":
        if len(self.means) != len(self.squares):
            raise ValueError("means and squares need one number per channel each")
        if any(square > mean or mean > self.num_images for mean, square in zip(self.means, self.squares, strict=True)):
            raise ValueError("pixels are 0 to 1: no sum of squares is larger than that of the means, or these than N")
        return self


class DataReport(StrictModel):
    """The report of a worker about its images. It replaces an earlier report; what is null may not leave."""

    num_unreadable: Annotated[int, Field(strict=True, ge=0, le=10**9)] | None = Field(
        default=None, description="Image files that cannot be read, and are left out."
    )
    card: DataCard | None = None
    sums: ChannelSums | None = None


class DataReported(StrictModel):
    """The coordinator has stored the report."""


class ChannelMoments(StrictModel):
    """The mean and the standard deviation per channel over the images of several sites: `data.mean`, `data.std`."""

    channels: Channels
    num_images: int
    num_clients: int
    mean: tuple[float, ...]
    std: tuple[float, ...]


def suppressed(counts: list[int], num_units: list[int], min_count: int) -> list[int | None]:
    """Return the counts, with None for those that count too few units (images, or patients).

    If what is missing could be found from the total, the next smallest counts are suppressed too. Zeros are shown.

    >>> suppressed([50, 3, 20, 0], [50, 3, 20, 0], 10)
    [50, None, None, 0]
    """
    hidden = {number for number, units in enumerate(num_units) if 0 < units < min_count}
    others = sorted(
        (number for number, count in enumerate(counts) if count and number not in hidden), key=lambda n: counts[n]
    )
    while hidden and others and (len(hidden) == 1 or sum(num_units[number] for number in hidden) < min_count):
        hidden.add(others.pop(0))
    return [None if number in hidden else count for number, count in enumerate(counts)]


def drift(histogram: tuple[float | None, ...], mean: tuple[float, ...]) -> float | None:
    """Return the total variation distance (0..1) of a histogram to the mean, over the bins that it shows.

    Returns None if it shows none.

    >>> drift((0.5, 0.5, None), (0.25, 0.75, 0.0))
    0.25
    """
    pairs = [(own, other) for own, other in zip(histogram, mean, strict=True) if own is not None]
    own_total, other_total = (sum(values) for values in zip(*pairs, strict=True)) if pairs else (0.0, 0.0)
    if not own_total or not other_total:
        return None
    return sum(abs(own / own_total - other / other_total) for own, other in pairs) / 2


def mean_histogram(histograms: list[tuple[float | None, ...]]) -> tuple[float, ...] | None:
    """Return the mean of several sites' histograms, in which each site counts once, or None without any.

    A bin that a site suppresses counts as an equal part of what its other bins lack.
    """
    if not histograms:
        return None
    filled = []
    for histogram in histograms:
        num_hidden = histogram.count(None)
        rest = max(0.0, 1 - sum(value for value in histogram if value is not None))
        filled.append([rest / num_hidden if value is None else value for value in histogram])
    return tuple(sum(values) / len(filled) for values in zip(*filled, strict=True))


def moments_of(sums: list[ChannelSums]) -> ChannelMoments:
    """Return mean and deviation per channel over all images of sites that have equal numbers of channels."""
    num_images = sum(each.num_images for each in sums)
    mean = [sum(values) / num_images for values in zip(*(each.means for each in sums), strict=True)]
    squares = [sum(values) / num_images for values in zip(*(each.squares for each in sums), strict=True)]
    std = [max(0.0, square - own**2) ** 0.5 for own, square in zip(mean, squares, strict=True)]
    return ChannelMoments(
        channels=len(mean), num_images=num_images, num_clients=len(sums), mean=tuple(mean), std=tuple(std)
    )
