"""Decode, examine and draw single image files.

If the spec has no window, PIL reads images of 8 bits with one or three channels, in 8 bits throughout. All others go
through floating-point values in 0..1: see :mod:`fedssl.data.windowing`.
"""

import functools
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps, UnidentifiedImageError

from fedssl.data import dicom, nifti, packed
from fedssl.data.contents import readable
from fedssl.data.image_files import ImageFiles
from fedssl.data.rasters import (
    IMAGE_ERRORS,
    MAX_BYTES,
    SIXTEEN_BITS,
    Raster,
    is_inverted,
    is_whole,
    misreading,
    num_bits,
    num_pages,
    open_by_pil,
    read_raster,
    refuse_animation,
    require_size,
)
from fedssl.data.trees import is_array, is_dicom, is_image, is_nifti, split_name
from fedssl.data.windowing import NEEDS_WINDOW, NeedsWindow, Pixels, quantised, with_channels
from fedssl.errors import DataError
from fedssl.protocol.data import WindowConfig, channels_in_words

_GREY = ("1", "L", "LA")
_TIFF = (".tif", ".tiff")
_MAX_NAMED = 10
MOST_ASPECT = 2
"""How much longer than wide an image may be in the cache, which bounds the memory of a batch."""

_DRAWN = WindowConfig(percentiles=(0.5, 99.5), bits=8)  # in pictures for people, if the spec has no window
_OWN = WindowConfig(voi=True, bits=8)


def release() -> None:
    """Free the memory of the files of many images that were loaded last. Call it after decoding."""
    nifti.release()
    packed.release()


def decoder_of(name: str) -> str:
    """Return the packages besides PIL that decode a listed image, with their versions; "" if only PIL does."""
    if is_image(name):
        return _with_versions("tifffile") if name.lower().endswith(_TIFF) else ""
    if is_dicom(name):
        return _with_versions("pydicom", "python-gdcm")
    return _with_versions("nibabel") if is_nifti(name) else ""


@functools.cache
def _with_versions(*packages: str) -> str:
    found = []
    for package in packages:
        with suppress(PackageNotFoundError):
            found.append(f" {package} {version(package)}")
    return "".join(found)


class Damaged(DataError):
    """An image that cannot be decoded, for the reason `why`."""

    def __init__(self, path: Path, why: str) -> None:
        super().__init__(f"cannot decode {readable(str(path))}: {why}; repair the image or remove it")
        self.why = why


def shape_of_first(files: ImageFiles, image_size: int | None, channels: int | None) -> tuple[int, int]:
    """Return (channels, size) as given, or those of the first image: its shorter side, and 1 channel if it is grey.

    Unreadable images are skipped, as far as they are tolerated. Raises Damaged.
    """
    if channels is not None and image_size is not None:
        return channels, image_size
    damaged = []
    for name in files.names[: files.num_tolerated + 1]:
        try:
            return _shape_of(files, name, image_size, channels)
        except Damaged as error:  # decoding reports it, once another image has given the shape
            damaged.append((name, error))
    if len(damaged) == 1:
        raise damaged[0][1]
    named = "; ".join(f"{readable(name)}: {error.why}" for name, error in damaged[:_MAX_NAMED])
    place = readable(str(files.tree.path))
    raise DataError(
        f"cannot decode any of the first {len(damaged):,} of {len(files):,} images in {place}: {named}; repair these "
        "images or remove them"
    )


def _shape_of(files: ImageFiles, name: str, image_size: int | None, channels: int | None) -> tuple[int, int]:
    if _is_read_by_pil(files, name, channels) and (opened := _open_unless_tiff(files, name)) is not None:
        with opened as first:
            if is_whole(first):
                grey = first.mode in (*_GREY, *SIXTEEN_BITS)
                return channels or (1 if grey else 3), image_size or min(first.size)
    height, width, found = _raster(files, name, channels).values.shape
    return channels or found, image_size or min(height, width)


def size_of(files: ImageFiles, name: str) -> tuple[int, int]:
    """Return (width, height) as an image's header declares them. Raises DataError, also for arrays."""
    path = files.tree.path / split_name(name)[0]
    try:
        if is_nifti(name):
            return nifti.read_header(path)[1]
        if is_dicom(name):
            return dicom.read_header(path).size
    except ValueError as error:
        raise Damaged(files.tree.path / name, str(error)) from error
    with open_image(files, name) as image:
        return image.size


def decode_file(files: ImageFiles, name: str, channels: int, size: int) -> tuple[Pixels, int | None]:
    """Return an image's pixels, (channels, size, size), and its highest value if only its upper 8 bits of 16 are used.

    The shorter side is scaled to `size` and the middle is cut out. Raises Damaged.
    """
    return _decode(files, name, channels, functools.partial(_square, size=size))


def decode_whole(files: ImageFiles, name: str, channels: int, size: int) -> tuple[Pixels, int | None]:
    """Return an image's pixels, (channels, height, width), and its highest value as :func:`decode_file` does.

    The shorter side is scaled to `size`. The aspect is kept, except that an image which is more than twice as long as
    wide loses its ends. Raises Damaged.
    """
    return _decode(files, name, channels, functools.partial(_scaled, size=size))


_Resize = Callable[[Image.Image], Image.Image]


def _decode(files: ImageFiles, name: str, channels: int, resize: _Resize) -> tuple[Pixels, int | None]:
    if _is_read_by_pil(files, name, channels):
        pixels, highest = _decode_by_pil(files, name, "L" if channels == 1 else "RGB", resize)
        return pixels[np.newaxis] if channels == 1 else pixels.transpose(2, 0, 1), highest
    window = files.reading.window
    raster = _raster(files, name, channels)
    try:
        unit_HWC = with_channels(raster.unit(window), channels)
    except ValueError as error:
        raise Damaged(files.tree.path / name, str(error)) from error
    # Scaled as PIL scales images of 8 bits, but without rounding.
    planes = (resize(Image.fromarray(np.ascontiguousarray(plane))) for plane in unit_HWC.transpose(2, 0, 1))
    unit_CHW = np.stack([np.asarray(plane, np.float32) for plane in planes])
    return quantised(unit_CHW, 8 if window is None else window.bits), None


def _square(image: Image.Image, size: int) -> Image.Image:
    if image.size == (size, size):
        return image
    return ImageOps.fit(image, (size, size), method=Image.Resampling.BILINEAR)


def _scaled(image: Image.Image, size: int) -> Image.Image:
    shorter, longer = sorted(image.size)
    side = min(longer, MOST_ASPECT * shorter)
    target = min(MOST_ASPECT * size, max(size, round(side * size / shorter)))
    width, height = (size if each == shorter else target for each in image.size)
    if (width, height) == image.size:
        return image
    left, top = ((each - min(each, side)) / 2 for each in image.size)
    box = (left, top, image.width - left, image.height - top)
    return image.resize((width, height), Image.Resampling.BILINEAR, box=box)


@dataclass(frozen=True, slots=True)
class DecodedFile:
    """The contents of an image file.

    Attributes:
        size: (width, height).
        mode: PIL's, or the type of the values.
        num_bits: of a value.
        highest: the highest value.
        needs_window: whether only a run with a window can use it.
    """

    size: tuple[int, int]
    mode: str
    num_bits: int
    highest: int
    needs_window: bool = False


def examine(files: ImageFiles, name: str) -> DecodedFile:
    """Decode one image, and describe it. Raises Damaged if it cannot be decoded."""
    if _is_read_by_pil(files, name, None) and (opened := _open_unless_tiff(files, name)) is not None:
        with opened as image:
            size, mode, depth = image.size, image.mode, num_bits(image)
            is_mapped = image.format == "TIFF" and (mode in ("I", "F") or (depth > 8 and is_inverted(image)))
            if is_whole(image) and not is_mapped:
                _, highest = _upright(files, name, image, "RGB")
                return DecodedFile(size, mode, depth, highest)
    raster = _raster(files, name, None)
    values = raster.values
    height, width, channels = values.shape
    if not np.isfinite(highest := values.max()):
        raise Damaged(files.tree.path / name, "it has values that are not finite numbers; replace them")
    mode = f"{values.dtype} with {channels_in_words(channels)}"
    return DecodedFile(
        (width, height), mode, raster.bits or 8 * values.dtype.itemsize, int(highest), values.dtype != np.uint8
    )


def read_values(files: ImageFiles, name: str) -> Raster:
    """Return an image's values as they are stored, upright. Raises Damaged, also for colours of 16 bits in a PNG."""
    return _raster(files, name, None)


def thumbnail(files: ImageFiles, name: str, side: int) -> Image.Image:
    """Return a whole image in RGB, with at most `side` x `side` pixels. Raises Damaged if it cannot be decoded.

    Without a window in the spec, an image of more than 8 bits is drawn with one of its own.
    """
    if _is_read_by_pil(files, name, None) and (opened := _open_unless_tiff(files, name)) is not None:
        with opened as image:
            if num_bits(image) == 8 and image.mode not in ("I", "F") and misreading(image) is None:
                upright, _ = _upright(files, name, image, "RGB")
                upright.thumbnail((side, side))
                return upright
    raster = _raster(files, name, None)
    try:
        return draw(raster, files.reading.window, side)
    except ValueError as error:
        raise Damaged(files.tree.path / name, str(error)) from error


def draw(raster: Raster, window: WindowConfig | None, side: int) -> Image.Image:
    """Return an image's first three channels in RGB, or its first in grey, with at most `side` x `side` pixels.

    Values of more than 8 bits without a window are drawn with the file's own, or else by their percentiles. Raises
    ValueError if a value is not a number.
    """
    if window is None and raster.values.dtype != np.uint8:
        window = _DRAWN if raster.voi is None else _OWN
    unit_HWC = raster.unit(window)
    shown = unit_HWC[:, :, :3] if unit_HWC.shape[2] >= 3 else unit_HWC[:, :, :1].repeat(3, axis=2)
    drawn = Image.fromarray(quantised(shown, 8).astype(np.uint8))
    drawn.thumbnail((side, side))
    return drawn


def open_image(files: ImageFiles, name: str) -> Image.Image:
    """Open an image file by PIL, which reads its header. Raises Damaged."""
    try:
        image = open_by_pil(files.tree.open(name))
        require_size(*image.size, 3)
    except IMAGE_ERRORS as error:
        raise Damaged(files.tree.path / name, _reason(error)) from error
    return image


def _reason(error: Exception) -> str:
    if isinstance(error, UnidentifiedImageError):  # PIL's own message repeats the path
        return "its content is not an image (it is empty, damaged at its beginning, or of a format that is not read)"
    if isinstance(error, Image.DecompressionBombError):
        return f"it has more than {MAX_BYTES // 3:,} pixels, and no more are decoded. Save it in parts, or smaller"
    if isinstance(error, OSError) and error.strerror is not None:  # it vanished, or must not be read
        return f"it cannot be read: {error.strerror}"
    return str(error) or type(error).__name__


def _open_unless_tiff(files: ImageFiles, name: str) -> Image.Image | None:
    """Return an image file opened by PIL, or None for a TIFF file that PIL cannot read, because tifffile may."""
    try:
        return open_image(files, name)
    except Damaged:
        if name.lower().endswith(_TIFF):
            return None
        raise


def _is_read_by_pil(files: ImageFiles, name: str, channels: int | None) -> bool:
    """Return whether a file is read in 8 bits throughout."""
    is_other = is_array(name) or is_dicom(name) or is_nifti(name)
    return files.reading.window is None and channels in (None, 1, 3) and not is_other


def _raster(files: ImageFiles, name: str, channels: int | None) -> Raster:
    try:
        file, number = split_name(name)
        if is_nifti(name):
            return nifti.read_slice(files.tree.path / file, number)
        if is_dicom(name):
            return dicom.read_frame(files.tree.path / file, number)
        return read_raster(files.tree.open(name), name, channels)
    except IMAGE_ERRORS as error:
        raise Damaged(files.tree.path / name, _reason(error)) from error


def _decode_by_pil(files: ImageFiles, name: str, mode: str, resize: _Resize) -> tuple[NDArray[np.uint8], int | None]:
    """Return an image's pixels, and its highest value if it has 16 bits."""
    with open_image(files, name) as image:
        depth = num_bits(image)
        upright, highest = _upright(files, name, image, mode)
    return np.asarray(resize(upright), np.uint8), highest if depth == 16 else None


def _upright(files: ImageFiles, name: str, image: Image.Image, mode: str) -> tuple[Image.Image, int]:
    """Return the image in 8 bits, turned as its EXIF data require, and its highest value. Raises DataError."""
    depth = num_bits(image)
    try:
        _refuse_partial(image, depth)
        ImageOps.exif_transpose(image, in_place=True)  # a copy would take a tenth of the time
        if image.mode in SIXTEEN_BITS:
            values = np.asarray(image)
            highest = int(values.max(initial=0))
            image = Image.fromarray((values >> (depth - 8)).astype(np.uint8))
        elif image.mode in ("I", "F"):
            raise NeedsWindow(f"the range of its values is unknown: {NEEDS_WINDOW}")
        else:  # of colour images with 16 bits, PIL returns the upper 8
            highest = 256 * max(int(high) for _, high in _ranges(image)) + 255 if depth > 8 else 0
        return image if image.mode == mode else image.convert(mode), highest
    except IMAGE_ERRORS as error:
        raise Damaged(files.tree.path / name, str(error)) from error


def _ranges(image: Image.Image) -> list[tuple[float, float]]:
    """Return the lowest and the highest value of each channel of colour or grey, without that of transparency."""
    return [channel.getextrema() for channel in image.split()[: 3 if "RGB" in image.mode else 1]]  # type: ignore[misc]


def _refuse_partial(image: Image.Image, depth: int) -> None:
    """Raise ValueError for files that PIL would read only in part, and for TIFF files with inverted values."""
    refuse_animation(image)
    if image.format != "TIFF":
        return
    if (num := num_pages(image)) > 1:
        raise ValueError(f"it has {num} pages, and only the first would be read; save each page as a file")
    if depth > 8 and is_inverted(image):
        raise NeedsWindow(f"it stores inverted values (WhiteIsZero) with 16 bits: {NEEDS_WINDOW}")
    if (error := misreading(image)) is not None:
        raise error
