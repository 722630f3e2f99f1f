"""Finds NaN and infinity in a stored artifact, without torch and in constant memory."""

from pathlib import Path
from typing import Any, Protocol

import numpy as np

from fedssl.artifacts.dtypes import FLOATS, INFO
from fedssl.artifacts.header import Header, TensorEntry, read_header
from fedssl.errors import ArtifactError, NotFinite

_NUMPY: dict[str, np.dtype[Any]] = {name: np.dtype(INFO[name].numpy_name) for name in FLOATS}
_CHUNK = 1 << 20
_BF16_EXPONENT = 0x7F80  # all exponent bits set: infinity or NaN


class SeekableReader(Protocol):
    """An open file that is only read from, at any position."""

    def seek(self, position: int, /) -> object: ...
    def read(self, size: int, /) -> bytes | memoryview: ...


class InMemory:
    """A file that is in memory, and is read without copies."""

    def __init__(self, content: bytes) -> None:
        self._content = memoryview(content)
        self._position = 0

    def seek(self, position: int, /) -> None:
        self._position = position

    def read(self, size: int, /) -> memoryview:
        found = self._content[self._position : self._position + size]
        self._position += len(found)
        return found


def check_finite(path: Path, header: Header | None = None) -> None:
    """Raise NotFinite, naming the tensor, at the first value that is not a finite number.

    The file's own header is read unless it is given. Raises ArtifactError if the header cannot be read, or the file
    is shorter than its header requires.
    """
    if header is None:
        with path.open("rb") as file:
            header = read_header(file)
    with path.open("rb") as file:
        check_finite_in(file, header)


def check_finite_in(file: SeekableReader, header: Header) -> None:
    """Do the same as `check_finite`, for a file that is open or in memory, and its header."""
    for span in _spans(header):
        # Most files have no bad value, and many small tensors: one by one, the calls take longer than the comparison.
        if _is_finite(file, header, span[0].dtype, span[0].start, span[-1].stop):
            continue
        for entry in span:
            if (is_finite := _is_finite(file, header, entry.dtype, entry.start, entry.stop)) is None:
                raise ArtifactError(f"the file ends within tensor {entry.name}")
            if not is_finite:
                raise NotFinite(
                    f"tensor {entry.name} holds NaN or infinity: training diverged. Lower the learning rate, "
                    "and check the images for constant or corrupt ones"
                )


def _spans(header: Header) -> list[list[TensorEntry]]:
    """Return the tensors of floating-point numbers, those together that lie behind one another and have one dtype."""
    spans: list[list[TensorEntry]] = []
    for entry in header.entries:
        if entry.dtype not in _NUMPY or entry.start == entry.stop:
            continue
        if spans and spans[-1][-1].dtype == entry.dtype and spans[-1][-1].stop == entry.start:
            spans[-1].append(entry)
        else:
            spans.append([entry])
    return spans


def _is_finite(file: SeekableReader, header: Header, name: str, start: int, stop: int) -> bool | None:
    """Return whether all numbers between two positions are finite, or None if the file ends before."""
    dtype = _NUMPY[name]
    count = (stop - start) // dtype.itemsize
    file.seek(header.data_start + start)
    while count:
        wanted = min(count, _CHUNK) * dtype.itemsize
        data = file.read(wanted)
        if len(data) < wanted:
            return None
        chunk = np.frombuffer(data, dtype=dtype)
        if name == "BF16":
            if ((chunk & _BF16_EXPONENT) == _BF16_EXPONENT).any():
                return False
        elif not np.isfinite(chunk).all():
            return False
        count -= chunk.size
    return True
