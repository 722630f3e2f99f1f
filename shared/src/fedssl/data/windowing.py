"""Map the values of an image file, of any range, to 0..1: windows by values, by percentiles and of DICOM.

Prepared pixels are uint8, 0..255, or int16, 0..32,767; both stand for 0..1. The latter is int16 because torch has few
operations for unsigned numbers of 16 bits.
"""

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedssl.errors import DataError
from fedssl.protocol.data import WindowConfig, channels_in_words

Pixels = NDArray[np.uint8 | np.int16]
"""Prepared pixels, of one of the two types."""

Range = tuple[float, float]
"""The values that stand for black and white."""

FULL = {np.dtype(np.uint8): 255, np.dtype(np.int16): 32_767}
"""The value of prepared pixels that stands for 1, by their type."""

_LUMA = np.array((0.299, 0.587, 0.114), np.float32)


def window(pixels: ArrayLike, center: float, width: float) -> NDArray[np.float64]:
    """Return values in 0..1 by the linear VOI function of DICOM PS3.3 C.11.2.1.2.1, with the output range 0..1.

    With c and w for centre and width, x becomes 0 if x <= c - 0.5 - (w - 1) / 2, 1 if x > c - 0.5 + (w - 1) / 2, and
    ((x - (c - 0.5)) / (w - 1) + 0.5) between. With w = 1 this is a threshold.

    Args:
        pixels: values of any shape, after the modality's rescale.
        center: of the window.
        width: at least 1.

    Raises ValueError if the width is below 1 or a number is not finite.

    >>> window([-161, -160, 39.5, 239, 240], center=40, width=400).tolist()
    [0.0, 0.0, 0.5, 1.0, 1.0]
    """
    if not (np.isfinite(center) and np.isfinite(width) and width >= 1):
        raise ValueError(f"a window needs a finite center and a width of at least 1; got {center} and {width}")
    values = np.asarray(pixels, np.float64)
    middle, half = center - 0.5, (width - 1) / 2
    between = np.zeros_like(values) if width == 1 else (values - middle) / (width - 1) + 0.5
    return np.where(values <= middle - half, 0.0, np.where(values > middle + half, 1.0, between))


def to_unit(
    values_HWC: NDArray[np.generic], config: WindowConfig | None, declared: Range | None
) -> NDArray[np.float32]:
    """Return an image's values in 0..1, of the same shape.

    Args:
        values_HWC: whole or floating-point numbers.
        config: the window. Without one, the values must be of 8 bits.
        declared: the values that the file declares as black and white, or None if it does not.

    Raises ValueError if there is no window for these values, if values of 8 bits are outside of the window's units (see
    :meth:`~fedssl.protocol.data.WindowConfig.refusal_of_8_bits`), or if a value is not a number.
    """
    require_finite(values_HWC)
    if config is None:
        if values_HWC.dtype != np.uint8:
            raise NeedsWindow(f"its values are {values_HWC.dtype}: {NEEDS_WINDOW}")
        return _between(values_HWC, 0, 255)
    if values_HWC.dtype == np.uint8 and (refusal := config.refusal_of_8_bits()) is not None:
        raise ValueError(refusal)
    if config.voi:
        raise ValueError(NO_VOI)
    if config.center is not None and config.width is not None:
        return window(values_HWC, config.center, config.width).astype(np.float32)
    if config.values is not None:
        return _between(values_HWC, *config.values)
    if config.percentiles is not None:
        return _by_percentiles(values_HWC, config.percentiles, per_channel=config.per_channel)
    if declared is None:
        raise ValueError(
            "it does not declare which values are black and white, which data.window.stored needs; set "
            "data.window.values or percentiles"
        )
    return _between(values_HWC, *declared)


def require_finite(values: NDArray[np.generic]) -> None:
    """Raise ValueError if a value is not a finite number."""
    if values.dtype.kind == "f" and not np.isfinite(values).all():
        raise ValueError("it has values that are not finite numbers; replace them")


NO_VOI = "it has no VOI LUT or window of its own, which data.window.voi needs; set data.window.values or percentiles"

NEEDS_WINDOW = "choose which values become black and white with [data.window] in the spec"


class NeedsWindow(ValueError):
    """There is an image of more than 8 bits, and no window in the spec."""


class WindowMissing(DataError):
    """Images hold more than 8 bits, and no window sets which values become black and white."""


def with_channels(unit_HWC: NDArray[np.float32], channels: int) -> NDArray[np.float32]:
    """Return an image with another number of channels: grey and RGB are converted to each other.

    Raises ValueError for any other pair of numbers.
    """
    found = unit_HWC.shape[2]
    if found == channels:
        return unit_HWC
    if (found, channels) == (1, 3):
        return np.repeat(unit_HWC, 3, axis=2)
    if (found, channels) == (3, 1):
        return (unit_HWC @ _LUMA)[:, :, np.newaxis]
    raise ValueError(f"it has {channels_in_words(found)}, and the run needs {channels} (data.channels)")


def quantised(unit: NDArray[np.float32], bits: int) -> Pixels:
    """Return prepared pixels of values in 0..1, rounded: int16 if `bits` is 16, else uint8."""
    dtype = np.dtype(np.int16 if bits == 16 else np.uint8)
    return np.rint(np.clip(unit, 0, 1) * FULL[dtype]).astype(dtype)


def prepared_type(config: WindowConfig | None) -> np.dtype[np.uint8] | np.dtype[np.int16]:
    """Return the type of the pixels that a window gives."""
    return np.dtype(np.int16) if config is not None and config.bits == 16 else np.dtype(np.uint8)


def window_arrays(values_NCHW: NDArray[np.generic], config: WindowConfig) -> Pixels:
    """Return the images of an array, each through the window on its own. Raises ValueError."""
    out = np.empty(values_NCHW.shape, prepared_type(config))
    declared = range_of(values_NCHW.dtype)
    for row, values_CHW in zip(out, values_NCHW, strict=True):
        row[:] = quantised(to_unit(values_CHW.transpose(1, 2, 0), config, declared), config.bits).transpose(2, 0, 1)
    return out


def range_of(dtype: np.dtype[np.generic]) -> Range | None:
    """Return the whole range of whole numbers of a type, or None if it is a floating-point type."""
    if dtype.kind not in "iu":
        return None
    info = np.iinfo(dtype)  # type: ignore[type-var]
    return float(info.min), float(info.max)


def _between(values: NDArray[np.generic], low: float, high: float) -> NDArray[np.float32]:
    unit = _halves(values)
    unit -= low / 2
    unit /= high / 2 - low / 2
    return np.clip(unit, 0, 1, out=unit).astype(np.float32, copy=False)


def _by_percentiles(values_HWC: NDArray[np.generic], which: Range, *, per_channel: bool) -> NDArray[np.float32]:
    halves = _halves(values_HWC)
    low, high = np.percentile(halves, which, axis=(0, 1) if per_channel else None)
    span = np.where(high > low, high - low, 1)  # an image of one value becomes black
    unit: NDArray[np.float32] = np.clip((halves - low) / span, 0, 1).astype(np.float32)
    return unit


def _halves(values: NDArray[np.generic]) -> NDArray[np.float32] | NDArray[np.float64]:
    """Return half of each value. The difference of two of them is never infinite, and their ratios are the values'."""
    halves = as_float(values)
    halves *= 0.5
    return halves


def as_float(values: NDArray[np.generic]) -> NDArray[np.float32] | NDArray[np.float64]:
    """Return the values in the smallest type in which they are exact, because an image may have many."""
    if values.dtype.itemsize <= 2 or values.dtype == np.float32:
        return values.astype(np.float32)
    return values.astype(np.float64)
