"""Read NIfTI files: their slices as values. Needs the extra `nifti`.

The slices of a volume are images along its third axis, as it is stored: row y and column x of slice z are the voxel
(x, y, z). In a series of volumes, those of the first volume come first. Values are those after the file's scaling.
"""

import functools
import gzip
import math
import struct
import threading
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedssl.data import format_packages
from fedssl.data.rasters import Raster
from fedssl.data.trees import MOST_PARTS
from fedssl.data.windowing import range_of

MAX_VOLUME_BYTES = 1 << 30
"""The largest size of a file's values. It is compared with what the file declares, before anything is read."""

_ERRORS = (OSError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError, EOFError, MemoryError,
           RuntimeError, struct.error, zlib.error, gzip.BadGzipFile)  # fmt: skip
_LOADING = threading.Lock()  # several threads read slices of one volume, which is decompressed once


@dataclass(frozen=True, slots=True)
class _Volumes:
    """All values of a file, (X, Y, Z) or (X, Y, Z, T), before the scaling."""

    values: NDArray[Any]
    slope: float
    intercept: float


def read_header(path: Path) -> tuple[int, tuple[int, int]]:
    """Return the number of slices, and their (width, height). Raises ValueError if the file cannot be read."""
    format_packages.require("NIfTI")
    try:
        width, height, *others = _image(path).shape
    except _errors() as error:
        raise ValueError(str(error) or type(error).__name__) from error
    return math.prod(others), (width, height)


def read_slice(path: Path, number: int | None) -> Raster:
    """Read one slice of a file. Raises ValueError if it cannot be read.

    `number` counts from 1; None is for a file that has only one.
    """
    format_packages.require("NIfTI")
    try:
        status = path.stat()
        with _LOADING:
            found = _volumes(path, f"{status.st_size} {status.st_mtime_ns} {status.st_ctime_ns}")
        return _slice(found, number)
    except _errors() as error:
        raise ValueError(str(error) or type(error).__name__) from error


def release() -> None:
    """Free the memory of the file that was loaded last."""
    _volumes.cache_clear()


def _errors() -> tuple[type[Exception], ...]:
    from nibabel.filebasedimages import ImageFileError
    from nibabel.spatialimages import HeaderDataError

    return (*_ERRORS, ImageFileError, HeaderDataError)


def _image(path: Path) -> Any:
    """Return a file whose header was read, and whose values are whole or floating-point numbers of 2 to 4 axes."""
    import nibabel

    image: Any = nibabel.load(path)
    is_nifti = isinstance(image, nibabel.Nifti1Pair)
    if not is_nifti:  # nibabel reads other formats too, by their content
        raise ValueError("its content is not NIfTI")
    shape, dtype = image.shape, image.get_data_dtype()
    if not 2 <= len(shape) <= 4 or 0 in shape:
        raise ValueError(f"it has the shape {shape}; only slices, volumes and series of volumes are read")
    if dtype.kind not in "uif":
        raise ValueError(f"its values are {dtype}, and only whole and floating-point numbers are read")
    if (needed := math.prod(shape) * dtype.itemsize) > MAX_VOLUME_BYTES:
        raise ValueError(
            f"its values take {needed / 1e9:,.1f} GB; at most {MAX_VOLUME_BYTES / 1e9:,.1f} GB are read. Split it"
        )
    if (num_slices := math.prod(shape[2:])) > MOST_PARTS:
        raise ValueError(f"it has {num_slices:,} slices; at most {MOST_PARTS:,} are read. Split it")
    return image


@functools.lru_cache(maxsize=1)
def _volumes(path: Path, stamp: str) -> _Volumes:
    image = _image(path)
    slope, intercept = (float(value) for value in (image.dataobj.slope, image.dataobj.inter))
    return _Volumes(np.asarray(image.dataobj.get_unscaled()), slope, intercept)


def _slice(found: _Volumes, number: int | None) -> Raster:
    planes = found.values.reshape(*found.values.shape[:2], -1, order="F")
    num_slices = planes.shape[2]
    if not (1 <= number <= num_slices if number is not None else num_slices == 1):
        wanted = "the only one" if number is None else f"number {number:,}"
        raise ValueError(f"it has {num_slices:,} slices, and {wanted} is wanted; it changed, or is damaged")
    values = planes[:, :, (number or 1) - 1].T[:, :, np.newaxis]
    declared = range_of(values.dtype)
    if (found.slope, found.intercept) == (1, 0):
        return Raster(np.ascontiguousarray(values), declared)
    scaled = values * np.float64(found.slope) + found.intercept
    if declared is None:
        return Raster(scaled, None)
    low, high = sorted(end * found.slope + found.intercept for end in declared)
    return Raster(scaled, (low, high))
