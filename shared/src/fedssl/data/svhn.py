"""Street View House Numbers, from the cropped digits in its authors' MAT-files.

The format is MATLAB's version 5 (The MathWorks, "MAT-File Format"): a header, then one element per variable, compressed
or not. This reader supports only arrays of numbers, which is all that these files contain. scipy's reader, which
supports the whole format, crashes the process on some damaged files.
"""

import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from fedssl.data.images import ImageData
from fedssl.errors import DataError

_MAX_BYTES = 2 << 30  # the largest of the three files, `extra`, is 1.6 GB uncompressed
_HEADER_BYTES = 128
_ORDERS = {b"IM": "<", b"MI": ">"}
_MATRIX, _COMPRESSED = 14, 15
_NUMBERS = {1: "i1", 2: "u1", 3: "i2", 4: "u2", 5: "i4", 6: "u4", 7: "f4", 9: "f8"}
_NUMERIC_CLASSES, _COMPLEX = range(6, 16), 0x08
_SIDE = 32


def read_svhn(path: Path) -> ImageData:
    """Read one split: `X` (32, 32, 3, N) of bytes and `y` (N, 1) with 1 to 10, where 10 stands for the digit 0.

    Raises:
        DataError: the file is damaged, not a MAT-file of this kind, or would take more than 2 GiB.
    """
    try:
        with path.open("rb") as file:
            arrays = dict(_arrays(file))
    except (OSError, EOFError, ValueError, struct.error, zlib.error) as error:
        raise DataError(f"cannot read {path}: {error}; fetch the file again") from error
    pixels, labels = (arrays.get(name, np.zeros(0)) for name in ("X", "y"))
    if pixels.dtype != np.uint8 or pixels.ndim != 4 or pixels.shape[:3] != (_SIDE, _SIDE, 3):
        raise DataError(f"{path} has no array X of 32 x 32 x 3 x N bytes: take the cropped digits (train_32x32.mat)")
    if labels.size != pixels.shape[3]:
        raise DataError(f"{path} has {pixels.shape[3]} images and {labels.size} labels; fetch the file again")
    if not np.isin(labels, np.arange(1, 11)).all():
        raise DataError(f"{path} has labels other than 1 to 10; fetch the file again")
    digits = labels.reshape(-1).astype(np.int64) % 10
    images = np.ascontiguousarray(pixels.transpose(3, 2, 0, 1))
    return ImageData(images, digits, tuple(str(digit) for digit in range(10)))


def _arrays(file: BinaryIO) -> Iterator[tuple[str, NDArray[np.generic]]]:
    """Yield the names and values of the numeric variables."""
    order = _ORDERS.get(file.read(_HEADER_BYTES)[_HEADER_BYTES - 2 :])
    if order is None:
        raise ValueError("it is not a MAT-file of version 5")
    left = _MAX_BYTES
    while tag := file.read(8):
        kind, length = struct.unpack(f"{order}II", tag)
        content = memoryview(file.read(min(length, left)))
        if kind == _COMPRESSED:
            element = _inflate(content, left)
            kind, length = struct.unpack(f"{order}II", element[:8])
            content = memoryview(element)[8:]
        if len(content) < length:
            raise EOFError("it is cut short, or larger than SVHN can be")
        left -= length
        if kind == _MATRIX and (array := _array(content[:length], order)) is not None:
            yield array


def _inflate(content: memoryview, limit: int) -> bytes:
    inflater = zlib.decompressobj()
    element = inflater.decompress(content, limit)
    if not inflater.eof:
        raise EOFError("it is cut short, or larger than SVHN can be")
    return element


def _array(content: memoryview, order: str) -> tuple[str, NDArray[np.generic]] | None:
    """Return a variable's name and value, or None if it is not an array of real numbers."""
    parts = _parts(content, order)
    _, flags = next(parts)
    (word,) = struct.unpack(f"{order}I", flags[:4])
    if word & 0xFF not in _NUMERIC_CLASSES or (word >> 8) & _COMPLEX:
        return None
    (_, dims), (_, name), (kind, values) = next(parts), next(parts), next(parts)
    if kind not in _NUMBERS:
        raise ValueError("it holds numbers of an unknown type")
    shape = np.frombuffer(dims, f"{order}i4")
    array = np.frombuffer(values, f"{order}{_NUMBERS[kind]}").reshape(shape, order="F")
    return bytes(name).decode("ascii"), array


def _parts(content: memoryview, order: str) -> Iterator[tuple[int, memoryview]]:
    """Yield the type and the bytes of each part of a variable. Up to four bytes are packed into the part's own tag."""
    at = 0
    while True:
        kind, length = struct.unpack(f"{order}II", content[at : at + 8])
        if kind >> 16:
            kind, length, start, end = kind & 0xFFFF, kind >> 16, at + 4, at + 8
        else:
            start, end = at + 8, at + 8 + -(-length // 8) * 8
        part = content[start : start + length]
        if len(part) < length:
            raise EOFError("it is cut short")
        yield kind, part
        at = end
