"""Read image files of any depth and number of channels as values, without mapping them to 8 bits."""

import io
import os
import re
import struct
import warnings
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import ExifTags, Image, ImageOps, UnidentifiedImageError

from fedssl.data.array_files import ARRAY_ERRORS
from fedssl.data.trees import is_array
from fedssl.data.windowing import NEEDS_WINDOW, NO_VOI, NeedsWindow, Range, range_of, require_finite, to_unit
from fedssl.protocol.data import WindowConfig, channels_in_words

FORMATS = ("JPEG", "PNG", "BMP", "WEBP", "TIFF")
"""The formats that PIL may read."""

MAX_BYTES = 1 << 29
"""The largest size of one decoded image. It is compared with what the file declares, before anything is decoded."""

# What PIL and its plugins raise for damaged files. The error for a decompression bomb derives from Exception directly.
IMAGE_ERRORS = (OSError, ValueError, TypeError, SyntaxError, LookupError, ArithmeticError, EOFError, struct.error,
                zlib.error, NotImplementedError, Image.DecompressionBombError, *ARRAY_ERRORS)  # fmt: skip

# PIL warns of images above half of this limit, which are read.
warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)

SIXTEEN_BITS = ("I;16", "I;16L", "I;16B", "I;16N")  # grey too
_SCAN_OF_JPEG, _END_OF_JPEG, _FEWEST_ZEROS = b"\xff\xda", b"\xff\xd9", 512  # compressed pixels have neither marker
_NUMPY = b"\x93NUMPY"
_UNCOMPRESSED, _DEFLATE = 1, (8, 32946)  # TIFF's codes; tifffile needs another package for all others but LZMA
_SIGNED = 2  # of TIFF's sample formats
_APART = 2  # of TIFF's planar configurations
_STACK_OF_IMAGEJ = re.compile(r"ImageJ=.*\nimages=(\d{1,9})\n")
_MOST_INFLATED = 1032  # Deflate's largest ratio
_EIGHT_BITS = {"1": "L", "L": "L", "LA": "L", "P": "RGB", "PA": "RGB", "RGB": "RGB", "RGBA": "RGB", "CMYK": "RGB",
               "YCbCr": "RGB", "LAB": "RGB"}  # fmt: skip
_ORIENTATIONS: dict[int, Callable[[Any], Any]] = {
    2: lambda a: a[:, ::-1], 3: lambda a: a[::-1, ::-1], 4: lambda a: a[::-1], 5: lambda a: a.swapaxes(0, 1),
    6: lambda a: np.rot90(a, -1), 7: lambda a: np.rot90(a, 2).swapaxes(0, 1), 8: np.rot90,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Raster:
    """One image's values as they are stored.

    Attributes:
        values: (H, W, C), upright, of whole or floating-point numbers.
        declared: the values that the file declares as black and white, or None if it does not.
        inverted: whether larger values are darker.
        voi: what maps the values to 0..1 as the file itself declares: the VOI LUT or window of DICOM.
        bits: how many bits of a value are used, if they are fewer than its type has.
    """

    values: NDArray[np.generic]
    declared: Range | None
    inverted: bool = False
    voi: Callable[[NDArray[Any]], NDArray[np.float32]] | None = None
    bits: int | None = None

    def unit(self, window: WindowConfig | None) -> NDArray[np.float32]:
        """Return the values in 0..1 through a window, (H, W, C); larger values are brighter.

        Raises ValueError as :func:`fedssl.data.windowing.to_unit`, and if the window should be the file's own and it
        has none.
        """
        if window is None or not window.voi:
            unit = to_unit(self.values, window, self.declared)
        elif self.voi is None:
            raise ValueError(NO_VOI)
        else:
            require_finite(self.values)
            unit = self.voi(self.values)
        return 1 - unit if self.inverted else unit


def read_raster(source: Path | io.BytesIO, name: str, channels: int | None) -> Raster:
    """Read an image file.

    Args:
        source: a path or an open file.
        name: the file's name; its suffix identifies arrays, the content determines all other formats.
        channels: the number that the run needs. It decides what TIFF pages and the axes of an array mean.

    Raises one of IMAGE_ERRORS if the file cannot be read, is larger than MAX_BYTES, or would be read in part.
    """
    if is_array(name):
        return _read_array(source, channels)
    try:
        with open_by_pil(source) as image:
            if _is_exact(image, channels):
                return _read_by_pil(image)
            if image.format != "TIFF":
                if num_bits(image) == 8:
                    return _read_by_pil(image)
                raise ValueError(
                    "its colours have 16 bits, and only 8 would be read; save it as TIFF (uncompressed or by Deflate) "
                    "or as .npy, which are read in full"
                )
    except UnidentifiedImageError:
        if not name.lower().endswith((".tif", ".tiff")):
            raise
    if isinstance(source, io.BytesIO):
        source.seek(0)
    return _read_tiff(source, channels)


def open_by_pil(source: Path | io.BytesIO) -> Image.Image:
    """Open an image file by PIL, which reads its header. Raises one of IMAGE_ERRORS."""
    image = Image.open(source, formats=FORMATS)
    image.filename = ""  # PIL would map some TIFF files into memory, and scramble those that it turns by a right angle
    if image.format in ("JPEG", "MPO"):
        try:
            _require_end(image.fp)
        except ValueError:
            image.close()
            raise
    return image


def _require_end(file: Any) -> None:
    """Raise ValueError if the end of a JPEG file was replaced by zeros, which libjpeg decodes without an error."""
    position = file.tell()
    file.seek(max(0, file.seek(0, os.SEEK_END) - _FEWEST_ZEROS))
    if not any(file.read()):
        file.seek(0)
        content = file.read()
        if content.rfind(_END_OF_JPEG) < content.rfind(_SCAN_OF_JPEG):  # cameras may write more after the end
            raise ValueError("its end is missing: it has zeros there, as an interrupted copy or download leaves them")
    file.seek(position)


def require_size(width: int, height: int, value_bytes: int) -> None:
    """Raise ValueError if an image would be larger than MAX_BYTES. `value_bytes` is the size of a pixel."""
    if (needed := width * height * value_bytes) > MAX_BYTES:
        raise ValueError(
            f"it has {width} x {height} pixels, which take {needed / 1e9:,.1f} GB; at most {MAX_BYTES / 1e9:,.1f} GB "
            "are decoded. Save it in parts, or smaller"
        )


def num_bits(image: Image.Image) -> int:
    """Return how many bits the file declares for a value: 12, 16, or 8 for all others. Before the image is loaded."""
    if image.format == "BMP":  # its mode BGR;16 has 16 bits for three values together
        return 8
    raw_modes = str([tile[3] for tile in getattr(image, "tile", ())])
    if "I;12" in raw_modes:
        return 12
    return 16 if ";16" in raw_modes or image.mode in SIXTEEN_BITS or has_planes_of_16_bits(image) else 8


def is_inverted(image: Image.Image) -> bool:
    """Return whether a TIFF file declares that 0 is white."""
    return bool(_tags(image).get(ExifTags.Base.PhotometricInterpretation) == 0)


def num_pages(image: Image.Image) -> int:
    """Return the number of a TIFF file's pages. ImageJ lists only the first of a large stack, and states how many."""
    found = _STACK_OF_IMAGEJ.match(str(_tags(image).get(ExifTags.Base.ImageDescription)))
    return max(getattr(image, "n_frames", 1), int(found[1]) if found else 1)


def is_whole(image: Image.Image) -> bool:
    """Return whether PIL reads all values of a file: it has one page, which PIL does not misread."""
    return image.format != "TIFF" or (num_pages(image) == 1 and misreading(image) is None)


def misreading(image: Image.Image) -> ValueError | None:
    """Return why PIL would read the values of a TIFF file's first page wrongly or in part; None if it reads them right.

    The error is NeedsWindow if a window lets them be read in another way.
    """
    if image.mode == "L" and _SIGNED in _tags(image).get(ExifTags.Base.SampleFormat, ()):  # PIL takes it for unsigned
        return NeedsWindow(f"its values are signed: {NEEDS_WINDOW}")
    if has_planes_of_16_bits(image):
        return NeedsWindow(f"its colours of 16 bits are stored one after the other: {NEEDS_WINDOW}")
    is_grey = image.mode in ("1", "L", *SIXTEEN_BITS)
    if is_grey and (num := int(_tags(image).get(ExifTags.Base.SamplesPerPixel, 1))) > 1:
        return ValueError(
            f"it has {num} channels, and only the first would be read: ask for {num} channels (worker: --channels, "
            "spec: data.channels), or save each as a file"
        )
    return None


def has_planes_of_16_bits(image: Image.Image) -> bool:
    """Return whether a TIFF file has 16 bits per colour in a plane for each, which PIL reads as 8. Before it is loaded.

    PIL reads them correctly if they are compressed.
    """
    is_apart = len(image.getbands()) > 1 and _tags(image).get(ExifTags.Base.PlanarConfiguration) == _APART
    is_uncompressed = all(tile[0] == "raw" for tile in getattr(image, "tile", ()))
    most_bits: int = max(_tags(image).get(ExifTags.Base.BitsPerSample, (1,)))
    return is_apart and is_uncompressed and most_bits > 8


def _tags(image: Image.Image) -> Any:
    """Return the tags of a TIFF file; none for other formats."""
    return getattr(image, "tag_v2", {})


def _is_exact(image: Image.Image, channels: int | None) -> bool:
    """Return whether PIL returns all values of a file, in their own range."""
    if not is_whole(image):
        return False
    if image.mode in SIXTEEN_BITS:
        return True
    wanted = channels in (None, 1, 3)  # PIL's images have transparency as the fourth channel, and never more
    return wanted and image.mode in _EIGHT_BITS and num_bits(image) == 8


def refuse_animation(image: Image.Image) -> None:
    """Raise ValueError for an animated PNG or WebP file, because only its first frame would be read."""
    if image.format in ("PNG", "WEBP") and (num_frames := getattr(image, "n_frames", 1)) > 1:
        raise ValueError(f"it has {num_frames} frames, and only the first would be read; save each frame as a file")


def _read_by_pil(image: Image.Image) -> Raster:
    refuse_animation(image)
    depth = num_bits(image)
    require_size(*image.size, 3)
    inverted = depth > 8 and image.format == "TIFF" and is_inverted(image)  # PIL inverts 8 bits, not 16
    upright = ImageOps.exif_transpose(image)
    if upright.mode not in SIXTEEN_BITS:
        values = np.asarray(upright.convert(_EIGHT_BITS[upright.mode]), np.uint8)
        return Raster(np.atleast_3d(values), (0, 255))
    values = np.asarray(upright).astype(np.uint16)
    highest = (1 << depth) - 1
    return Raster(np.atleast_3d(highest - values if inverted else values), (0, highest), bits=depth)


def _read_array(source: Path | io.BytesIO, channels: int | None) -> Raster:
    _require_array(source)
    array: Any = np.load(source, mmap_mode="r" if isinstance(source, Path) else None, allow_pickle=False)
    if not isinstance(array, np.ndarray) or array.dtype.kind not in "uif":
        raise ValueError("it is not an array of numbers")
    if array.nbytes > MAX_BYTES:
        raise ValueError(f"it takes {array.nbytes / 1e9:,.1f} GB; at most {MAX_BYTES / 1e9:,.1f} GB are read")
    if array.ndim == 2:
        array = array[:, :, np.newaxis]
    if array.ndim != 3 or 0 in array.shape:
        raise ValueError(f"an array of shape {array.shape} is not an image: (H, W), (H, W, C) or (C, H, W) is")
    if array.shape[2] != channels and (array.shape[0] == channels or (array.shape[2] > 16 and array.shape[0] <= 16)):
        array = array.transpose(1, 2, 0)
    values = np.array(array)
    return Raster(values, range_of(values.dtype))


def _require_array(source: Path | io.BytesIO) -> None:
    """Raise ValueError unless the content is an array of NumPy."""
    if isinstance(source, Path):
        with source.open("rb") as file:
            start = file.read(len(_NUMPY))
    else:
        start = source.read(len(_NUMPY))
        source.seek(0)
    if start != _NUMPY:
        raise ValueError("its content is not an array of NumPy, as its suffix promises; give it its own suffix")


def _read_tiff(source: Path | io.BytesIO, channels: int | None) -> Raster:
    import tifffile

    try:
        with tifffile.TiffFile(source) as file:
            return _read_series(file, channels)
    except tifffile.TiffFileError as error:
        raise ValueError(str(error)) from error


def _read_series(file: Any, channels: int | None) -> Raster:
    if len(file.series) != 1:
        raise ValueError(f"it holds {len(file.series)} images of different shapes; save each as a file")
    [series], page = file.series, file.pages.first
    if series.is_multifile or None in series.pages:  # tifffile reads the others, or zeros in place of missing ones
        raise ValueError("it is one of several files that hold one image (OME-TIFF); save the image as one file")
    if series.nbytes > MAX_BYTES:
        width, height = page.imagewidth, page.imagelength
        require_size(width, height, -(-series.nbytes // (width * height)))
    photometric = int(page.photometric)
    if photometric == 3:
        raise ValueError("it has a palette and several pages; save it in colours")
    found = zip(series.axes, series.shape, strict=True)
    kept = [(axis, length) for axis, length in found if length > 1 or axis in "YX"]
    axes = "".join(axis for axis, _ in kept)
    others = [(axis, length) for axis, length in kept if axis not in "YX"]
    _require_channels(others, channels)
    _require_bounded(file, series)
    values = np.asarray(series.asarray()).reshape([length for _, length in kept])
    values = values.transpose([axes.index(axis) for axis in "YX"] + [axes.index(axis) for axis, _ in others])
    values = np.atleast_3d(values)
    if photometric == 2 and values.shape[2] == 4 and channels != 4:
        values = values[:, :, :3]  # the fourth sample of RGB is transparency
    declared = _declared(values.dtype, page.bitspersample)
    if photometric == 0:
        if declared is None or declared[0] < 0:
            raise ValueError(f"it stores inverted values (WhiteIsZero) of {values.dtype}; save it as BlackIsZero")
        values = (int(declared[1]) - values).astype(values.dtype)
    turn = _ORIENTATIONS.get(page.tags.valueof(274, 1), lambda a: a)
    return Raster(np.ascontiguousarray(turn(values)), declared)


def _require_channels(others: list[tuple[str, int]], channels: int | None) -> None:
    """Raise ValueError unless the axes other than height and width are channels.

    They are channels if the file declares so. Pages without a declaration are channels only if the run needs as many,
    and more than the three of RGB: three grey pages may just as well be three images.
    """
    undeclared = [length for axis, length in others if axis not in "SC"]
    if len(others) <= 1 and all(length == channels and channels not in (1, 3) for length in undeclared):
        return
    num = " x ".join(str(length) for axis, length in others if axis != "S")
    if channels == 3 and undeclared == [3]:
        raise ValueError(
            "it has 3 grey pages, which are not taken for the colours of RGB; save it as RGB, or each page as a file"
        )
    if channels is None and len(others) == 1 and undeclared != [3]:
        raise ValueError(
            f"it has {num} pages: if they are channels, ask for {num} channels (worker: --channels, spec: "
            "data.channels), or else save each page as a file"
        )
    wanted = "" if channels is None else f", and the run needs {channels_in_words(channels)} (data.channels)"
    raise ValueError(f"it has {num} pages{wanted}; save each page as a file")


def _require_bounded(file: Any, series: Any) -> None:
    """Raise ValueError if a strip or tile cannot be decompressed, or would be larger than the image."""
    for page in filter(None, series.pages):
        if page.compression != _UNCOMPRESSED and page.compression not in _DEFLATE:
            name = getattr(page.compression, "name", page.compression)
            raise ValueError(
                f"its values are compressed by {name}, which is read only for images of one page, with 1 or 3 channels "
                "of 8 bits or 1 of 16; save it uncompressed, or by Deflate"
            )
        if page.compression in _DEFLATE:
            for offset, count in zip(page.dataoffsets, page.databytecounts, strict=True):
                if count * _MOST_INFLATED > MAX_BYTES:
                    file.filehandle.seek(offset)
                    unpacked = zlib.decompressobj().decompress(file.filehandle.read(count), series.nbytes + 1)
                    if len(unpacked) > series.nbytes:
                        raise ValueError("a strip or tile unpacks to more than the whole image; save it again")


def _declared(dtype: np.dtype[np.generic], bits: Any) -> Range | None:
    """Return the range of a TIFF file's values: 0..4,095 for 12 bits in two bytes."""
    if dtype.kind == "u" and isinstance(bits, int) and bits <= 32:
        return 0, (1 << bits) - 1
    return range_of(dtype)
