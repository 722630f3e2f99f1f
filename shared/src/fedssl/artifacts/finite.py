"""Finds NaN and infinity in a stored artifact, without torch and in constant memory."""

from pathlib import Path
from typing import Any, Protocol

import numpy as np

from fedssl.artifacts.dtypes import FLOATS, INFO
from fedssl.artifacts.header import Header, Reader, TensorEntry, read_header
from fedssl.errors import ArtifactError, NotFinite

_NUMPY: dict[str, np.dtype[Any]] = {name: np.dtype(INFO[name].numpy_name) for name in FLOATS}
_CHUNK = 1 << 20
_BF16_EXPONENT = 0x7F80  # all exponent bits set: infinity or NaN


class SeekableReader(Reader, Protocol):
    """An open file that is only read from, at any position."""

    def seek(self, position: int, /) -> object: ...


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
    for entry in header.entries:
        if entry.dtype in _NUMPY and entry.stop > entry.start and not _is_finite(file, header, entry):
            raise NotFinite(
                f"tensor {entry.name} holds NaN or infinity: training diverged. Lower the learning rate, "
                "and check the images for constant or corrupt ones"
            )


def _is_finite(file: SeekableReader, header: Header, entry: TensorEntry) -> bool:
    dtype = _NUMPY[entry.dtype]
    count = (entry.stop - entry.start) // dtype.itemsize
    file.seek(header.data_start + entry.start)
    while count:
        wanted = min(count, _CHUNK) * dtype.itemsize
        data = file.read(wanted)
        if len(data) < wanted:
            raise ArtifactError(f"the file ends within tensor {entry.name}")
        chunk = np.frombuffer(data, dtype=dtype)
        if entry.dtype == "BF16":
            if ((chunk & _BF16_EXPONENT) == _BF16_EXPONENT).any():
                return False
        elif not np.isfinite(chunk).all():
            return False
        count -= chunk.size
    return True
