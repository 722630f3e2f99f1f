"""Read DICOM files: their frames as values, and what a listing needs of their headers. Needs the extra `dicom`.

Values are those after the modality's rescale (PS3.3 C.7.6.16.2.9 and C.11.1), for example Hounsfield units. The VOI LUT
or window of a file (C.11.2) is applied only if the run asks for it, and images of MONOCHROME1 are inverted after the
window, so that larger values are brighter in every image. Images are not turned: their orientation to the patient is
left as the device has stored it.

Sizes are compared with what a file declares before anything is decoded: a compressed frame is decoded only if its own
header has the size that the file declares.
"""

import functools
import hashlib
import logging
import os
import secrets
import struct
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from fedssl.data import format_packages
from fedssl.data.rasters import Raster, require_size
from fedssl.data.trees import MOST_PARTS
from fedssl.data.windowing import Range, range_of, window

_NO_PIXELS = "it has no pixels"
_DECODED = (
    "NumberOfFrames", "Rows", "Columns", "SamplesPerPixel", "BitsAllocated", "BitsStored", "HighBit",
    "PixelRepresentation", "PhotometricInterpretation", "RescaleSlope", "RescaleIntercept", "ModalityLUTSequence",
    "WindowCenter", "WindowWidth", "VOILUTFunction", "VOILUTSequence", "SharedFunctionalGroupsSequence",
    "PerFrameFunctionalGroupsSequence", "RedPaletteColorLookupTableDescriptor",
    "GreenPaletteColorLookupTableDescriptor", "BluePaletteColorLookupTableDescriptor",
    "RedPaletteColorLookupTableData", "GreenPaletteColorLookupTableData", "BluePaletteColorLookupTableData",
    "SegmentedRedPaletteColorLookupTableData", "SegmentedGreenPaletteColorLookupTableData",
    "SegmentedBluePaletteColorLookupTableData",
)  # fmt: skip
_LISTED = ("NumberOfFrames", "Rows", "Columns", "PatientID")
_DEFLATED = "1.2.840.10008.1.2.1.99"
_RLE = "1.2.840.10008.1.2.5"
_PIXELS = (b"\xe0\x7f", b"\x7f\xe0")  # the group of all pixel data, in both byte orders
_ELEMENT_HEADER = 12  # bytes before pixel data in a compressed file, which is always explicit and little-endian
_LEAST_FRAME_BYTES = 8  # per frame of a file; a listing has an entry per frame that a file declares
# What pydicom and its decoders raise for damaged files.
_ERRORS = (OSError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError, EOFError, RuntimeError,
           NotImplementedError, MemoryError, struct.error)  # fmt: skip
_SECRET = secrets.token_bytes(16)


@dataclass(frozen=True, slots=True)
class Header:
    """The part of a file's header that a listing needs.

    Attributes:
        num_frames: the number of its images; 0 if it has no pixels, as in reports and indexes.
        size: (width, height) in pixels.
        patient: a keyed hash of its patient's identifier, or None if it has none. The identifier itself is not kept.
    """

    num_frames: int
    size: tuple[int, int]
    patient: bytes | None


def read_header(path: Path) -> Header:
    """Read a file's header. Raises ValueError if it cannot be read."""
    format_packages.require("DICOM")
    try:
        with path.open("rb") as file:
            found = _dataset(path, file, _LISTED)
            has_pixels = file.read(2) in _PIXELS
            patient = str(found.get("PatientID") or "").strip()
            size = int(found.get("Columns") or 0), int(found.get("Rows") or 0)
            num_frames = int(found.get("NumberOfFrames") or 1) if has_pixels else 0
            most = min(MOST_PARTS, max(1, os.fstat(file.fileno()).st_size // _LEAST_FRAME_BYTES))
    except _errors() as error:
        raise ValueError(_reason(error)) from error
    if not 0 <= num_frames <= most:
        raise ValueError(f"it declares {num_frames:,} frames; at most {most:,} fit into it, or are read")
    digest = hashlib.blake2b(os.fsencode(patient), key=_SECRET, digest_size=16).digest() if patient else None
    return Header(num_frames, size, digest)


def read_frame(path: Path, number: int | None) -> Raster:
    """Read one frame of a file. Raises ValueError if it cannot be read.

    `number` counts from 1, as in DICOM; None is for a file that has only one.
    """
    format_packages.require("DICOM")
    try:
        return _read_frame(path, number)
    except _errors() as error:
        raise ValueError(_reason(error)) from error


def _errors() -> tuple[type[Exception], ...]:
    from pydicom.errors import BytesLengthException, InvalidDicomError

    return (*_ERRORS, BytesLengthException, InvalidDicomError)


def _reason(error: Exception) -> str:
    if type(error).__name__ == "InvalidDicomError":
        return "its content is not DICOM: it lacks the letters DICM after 128 bytes"
    if isinstance(error, AttributeError | LookupError):  # pydicom raises this for a missing element
        return f"its header lacks something that its pixels need: {error}"
    return str(error) or type(error).__name__


@functools.cache
def _quiet() -> None:
    """Keep pydicom from logging the values of elements that break a rule: they may be those of a patient."""
    warnings.filterwarnings("ignore", module=r"(pydicom|fedssl\.data\.dicom)\b.*")
    logging.getLogger("pydicom").setLevel(logging.CRITICAL)


def _dataset(path: Path, file: BinaryIO, keywords: tuple[str, ...]) -> Any:
    """Read some elements before the pixels; the file is then at the pixels, or at its end."""
    import pydicom

    _quiet()
    syntax = _syntax(path)
    if syntax == _DEFLATED:  # it would be decompressed as a whole, whatever its size
        raise ValueError("it is deflated as a whole, which is not read; save it with another transfer syntax")
    return pydicom.dcmread(file, specific_tags=list(keywords), stop_before_pixels=True)


def _syntax(path: Path) -> Any:
    from pydicom.filereader import read_file_meta_info

    syntax = read_file_meta_info(path).get("TransferSyntaxUID")
    if not syntax:
        raise ValueError("it does not declare its transfer syntax; save it again")
    return syntax


def _read_frame(path: Path, number: int | None) -> Raster:
    from pydicom.pixels.utils import pixel_array

    with path.open("rb") as file:
        header = _dataset(path, file, _DECODED)
        if file.read(2) not in _PIXELS:
            raise ValueError(_NO_PIXELS)
        place = file.seek(-2, os.SEEK_CUR)
        num_frames = int(header.get("NumberOfFrames") or 1)
        if not (1 <= number <= num_frames if number is not None else num_frames == 1):
            wanted = "the only one" if number is None else f"number {number:,}"
            raise ValueError(f"it declares {num_frames:,} frames, and {wanted} is wanted; it changed, or is damaged")
        index = (number or 1) - 1
        value_bytes = -(-int(header.BitsAllocated) // 8) * int(header.SamplesPerPixel)
        require_size(int(header.Columns), int(header.Rows), value_bytes)
        syntax = _syntax(path)
        _require_decoder(syntax)
        if syntax.is_encapsulated:
            file.seek(place + _ELEMENT_HEADER)
            _require_declared_size(_frame_bytes(file, index, num_frames), header, syntax)
        if not syntax.is_encapsulated or syntax == _RLE:
            _require_lowest_bits(header)
    values = np.asarray(pixel_array(path, index=index))
    if str(header.PhotometricInterpretation) == "PALETTE COLOR":
        from pydicom.pixels.processing import apply_color_lut

        values = apply_color_lut(values, header)
        if int(header.RedPaletteColorLookupTableDescriptor[2]) == 8 and values.max(initial=0) < 256:
            values = values.astype(np.uint8)  # some files have each byte of a palette in two (PS3.3 C.7.9.2)
        return Raster(values, range_of(values.dtype), bits=8 * values.dtype.itemsize)
    if values.ndim == 3:
        return Raster(values, _stored_range(values, header), bits=int(header.BitsStored))
    if syntax.is_encapsulated:
        values = _with_sign(values, header)
    return _grey(values, header, index)


def _with_sign(values: NDArray[Any], header: Any) -> NDArray[Any]:
    """Return signed values with their sign extended to all bits above the stored ones, which a file may leave at 0.

    pydicom does so for values that are not compressed.
    """
    unused = 8 * values.dtype.itemsize - int(header.BitsStored)
    return (values << unused) >> unused if values.dtype.kind == "i" and unused > 0 else values


def _require_lowest_bits(header: Any) -> None:
    """Raise ValueError if the values are not in the lowest bits, from which pydicom takes them."""
    highest, stored = header.get("HighBit"), header.get("BitsStored")
    if highest is not None and stored is not None and int(highest) != int(stored) - 1:
        raise ValueError(
            f"its values of {stored} bits end at bit {highest} (HighBit) in place of {int(stored) - 1}, which is not "
            "read; save it again"
        )


def _grey(values_HW: NDArray[Any], header: Any, index: int) -> Raster:
    """Return an image of one channel after the modality's rescale."""
    stored = _stored_range(values_HW, header)
    rescaled, declared = _rescaled(values_HW, stored, header, index)
    if rescaled.dtype == np.uint8 and declared != (0, 255):
        rescaled = rescaled.astype(np.uint16)  # so that a run needs a window for it
    inverted = str(header.PhotometricInterpretation) == "MONOCHROME1"
    voi = _Voi.of(_functional_group(header, index, "FrameVOILUTSequence"))
    bits = int(header.get("BitsStored") or 8 * values_HW.dtype.itemsize)
    return Raster(rescaled[:, :, np.newaxis], declared, inverted=inverted, voi=voi, bits=bits)


def _stored_range(values: NDArray[Any], header: Any) -> Range | None:
    if values.dtype.kind == "f":
        return None
    bits = int(header.BitsStored)
    return (-(1 << (bits - 1)), (1 << (bits - 1)) - 1) if header.PixelRepresentation else (0, (1 << bits) - 1)


def _rescaled(values: NDArray[Any], stored: Range | None, header: Any, index: int) -> tuple[NDArray[Any], Range | None]:
    """Return values in the modality's units, and those that the lowest and highest storable ones become."""
    if header.get("ModalityLUTSequence"):
        from pydicom.pixels.processing import apply_modality_lut

        found = apply_modality_lut(values, header)
        return found, (0, (1 << int(header.ModalityLUTSequence[0].LUTDescriptor[2])) - 1)
    group = _functional_group(header, index, "PixelValueTransformationSequence")
    slope, intercept = (
        float(default if (found := group.get(name)) is None else found)
        for name, default in (("RescaleSlope", 1), ("RescaleIntercept", 0))
    )
    if (slope, intercept) == (1, 0):
        return values, stored
    whole = slope.is_integer() and intercept.is_integer() and values.dtype.itemsize <= 2
    # Whole numbers of up to 16 bits stay whole, if the results have at most 32 bits.
    if whole and max(abs(slope), 1) * 65_536 + abs(intercept) < 2**31:
        found = values.astype(np.int32) * np.int32(slope) + np.int32(intercept)
    else:
        found = values * slope + intercept
    ends = None if stored is None else sorted(end * slope + intercept for end in stored)
    return found, None if ends is None else (ends[0], ends[1])


def _functional_group(header: Any, index: int, keyword: str) -> Any:
    """Return what holds for one frame: an item of the functional groups of an enhanced file, or the file itself."""
    for name, at in (("PerFrameFunctionalGroupsSequence", index), ("SharedFunctionalGroupsSequence", 0)):
        groups = header.get(name) or ()
        if at < len(groups) and (found := groups[at].get(keyword)):
            return found[0]
    return header


@dataclass(frozen=True, slots=True)
class _Voi:
    """The VOI LUT or window of a file: values of interest become 0..1.

    Attributes:
        item: the elements with the LUT.
        center, width, function: of a window; None if there is a LUT, which is preferred.
    """

    item: Any
    center: float | None = None
    width: float | None = None
    function: str = "LINEAR"

    @classmethod
    def of(cls, item: Any) -> "_Voi | None":
        """Return the first VOI LUT of a dataset, or its first window, or None if it has neither."""
        if item.get("VOILUTSequence"):
            return cls(item)
        center, width = (_first(item.get(name)) for name in ("WindowCenter", "WindowWidth"))
        if center is None or width is None:
            return None
        return cls(item, center, width, str(item.get("VOILUTFunction") or "LINEAR"))

    def __call__(self, values: NDArray[Any]) -> NDArray[np.float32]:
        """Return values in 0..1, of the same shape. Raises ValueError for a window that DICOM forbids."""
        if self.center is None or self.width is None:
            from pydicom.pixels.processing import apply_voi

            _, first, bits = map(int, self.item.VOILUTSequence[0].LUTDescriptor)
            whole = np.rint(values).astype(np.int32)
            if first >= 1 << 15 and whole.min() < 0:
                whole += 1 << 16  # its first value is negative, and a file with implicit types does not declare signs
            found = apply_voi(whole, self.item)
            return (found / ((1 << bits) - 1)).astype(np.float32)
        if self.function == "LINEAR":
            return window(values, self.center, self.width).astype(np.float32)
        if self.width <= 0:
            raise ValueError(f"its window has the width {self.width:g}, which must be above 0")
        place = (values.astype(np.float64) - self.center) / self.width
        if self.function == "LINEAR_EXACT":  # PS3.3 C.11.2.1.3.2
            return np.clip(place + 0.5, 0, 1).astype(np.float32)
        if self.function == "SIGMOID":  # PS3.3 C.11.2.1.3.1
            return (1 / (1 + np.exp(-4 * place))).astype(np.float32)
        raise ValueError(f"its VOI LUT function, {self.function}, is not known")


def _first(value: Any) -> float | None:
    if value is None or value == "":
        return None
    try:
        return float(value)
    except TypeError:  # several windows
        return float(value[0]) if len(value) else None


def _require_decoder(syntax: Any) -> None:
    """Raise ValueError if no package that is installed decodes a transfer syntax."""
    from pydicom.pixels.decoders.base import get_decoder

    try:
        is_available = get_decoder(syntax).is_available
    except NotImplementedError:
        is_available = False
    if not is_available:
        name = syntax.name if syntax.name != str(syntax) else "unknown"
        raise ValueError(f"its transfer syntax, {syntax} ({name}), is not decoded here; save it with another one")


def _frame_bytes(file: BinaryIO, index: int, num_frames: int) -> bytes:
    from pydicom.encaps import get_frame

    found: bytes = get_frame(file, index, number_of_frames=num_frames)
    return found


def _require_declared_size(frame: bytes, header: Any, syntax: Any) -> None:
    """Raise ValueError if a compressed frame would become larger than its file declares."""
    height, width, samples = int(header.Rows), int(header.Columns), int(header.SamplesPerPixel)
    if syntax == _RLE:
        declared = height * width * samples * -(-int(header.BitsAllocated) // 8)
        most = declared + 16 * 128  # a segment may be padded
        if _num_unpacked(frame, most) > most:
            raise ValueError(f"its frame unpacks to more than the {declared:,} bytes that it declares; save it again")
        return
    found = _coded_size(frame)
    if found is None:
        raise ValueError("its frame is not compressed as its transfer syntax promises; save it again")
    if found != (height, width, samples):
        raise ValueError(
            f"its frame has {found[1]} x {found[0]} pixels of {found[2]} samples, but its header declares "
            f"{width} x {height} of {samples}; save it again"
        )


def _coded_size(frame: bytes) -> tuple[int, int, int] | None:
    """Return the height, width and number of samples in the header of a frame of JPEG, JPEG-LS or JPEG 2000."""
    start = frame.find(b"\xff\x4f\xff\x51", 0, 1 << 12)  # JPEG 2000: SOC and SIZ, perhaps in a JP2 container
    if start >= 0 and frame[:2] != b"\xff\xd8":
        right, bottom, left, top = struct.unpack_from(">4I", frame, start + 8)
        [samples] = struct.unpack_from(">H", frame, start + 40)
        return bottom - top, right - left, samples
    if frame[:2] != b"\xff\xd8":
        return None
    at = 2
    while at + 10 <= len(frame) and frame[at] == 0xFF:
        marker = frame[at + 1]
        if marker == 0xFF:  # padding
            at += 1
            continue
        if marker in _STARTS_OF_FRAMES:
            height, width, samples = struct.unpack_from(">HHB", frame, at + 5)
            return height, width, samples
        [length] = struct.unpack_from(">H", frame, at + 2)
        at += 2 + length
    return None


_STARTS_OF_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC} | {0xF7}  # 0xF7: JPEG-LS


def _num_unpacked(frame: bytes, most: int) -> int:
    """Return how many bytes a frame of RLE (PS3.5 annex G) unpacks to; counting stops above `most`."""
    num = 0
    [num_segments] = struct.unpack_from("<I", frame)
    starts = struct.unpack_from("<15I", frame, 4)[: min(num_segments, 15)]
    for start, end in zip(starts, (*starts[1:], len(frame)), strict=True):
        at = start
        while at < end and num <= most:
            code = frame[at] if at < len(frame) else 128
            if code > 128:  # a byte that is repeated 257 - code times
                num, at = num + 257 - code, at + 2
            elif code < 128:
                num, at = num + code + 1, at + code + 2
            else:
                at += 1
    return num
