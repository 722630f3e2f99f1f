"""Finds NaN and infinity in a stored artifact, without torch and in constant memory."""

from pathlib import Path
from typing import Any, Protocol

import numpy as np

from fedssl.artifacts.dtypes import FLOATS, INFO
from fedssl.artifacts.header import Header, TensorEntry, read_header
from fedssl.errors import ArtifactError, NotFinite

_NUMPY: dict[str, np.dtype[Any]] = {name: np.dtype(INFO[name].numpy_name) for name in FLOATS}
_CHUNK = 1 << 16  # numbers per chunk, which is still in the processor's cache when it is searched
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
    """Do the same as `check_finite` for a file that is open or in memory, and its header. Reads it once, in order."""
    for span in _spans(header):
        dtype, position, stop = _NUMPY[span[0].dtype], span[0].start, span[-1].stop
        file.seek(header.data_start + position)
        while position < stop:
            wanted = min(stop - position, _CHUNK * dtype.itemsize)
            data = file.read(wanted)
            if len(data) < wanted:
                raise ArtifactError(f"the file ends within tensor {_name_at(span, position + len(data))}")
            is_finite = _are_finite(np.frombuffer(data, dtype=dtype), is_bfloat16=span[0].dtype == "BF16")
            if not is_finite.all():
                name = _name_at(span, position + int(is_finite.argmin()) * dtype.itemsize)
                raise NotFinite(
                    f"tensor {name} holds NaN or infinity: training diverged. Lower the learning rate, "
                    "and check the images for constant or corrupt ones"
                )
            position += wanted


def _spans(header: Header) -> list[list[TensorEntry]]:
    """Return the floating-point tensors, with adjacent ones of the same dtype in one group.

    With many small tensors, the calls would take longer than the comparison.
    """
    spans: list[list[TensorEntry]] = []
    for entry in header.entries:
        if entry.dtype not in _NUMPY or entry.start == entry.stop:
            continue
        if spans and spans[-1][-1].dtype == entry.dtype and spans[-1][-1].stop == entry.start:
            spans[-1].append(entry)
        else:
            spans.append([entry])
    return spans


def _name_at(span: list[TensorEntry], position: int) -> str:
    return next(entry.name for entry in span if position < entry.stop)


def _are_finite(numbers: Any, *, is_bfloat16: bool) -> Any:
    """Return a boolean per number. Those of bfloat16 are given as integers."""
    return (numbers & _BF16_EXPONENT) != _BF16_EXPONENT if is_bfloat16 else np.isfinite(numbers)
