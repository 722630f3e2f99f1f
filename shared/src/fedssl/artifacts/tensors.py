"""Reads and writes tensors in safetensors files. Needs torch, so import it only where torch is installed.

Tensors are put in name order and made contiguous before they are written, so that equal tensors give equal bytes.
"""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.torch import save

from fedssl.artifacts.checked import read_checked
from fedssl.artifacts.dtypes import INFO, ITEM_SIZES
from fedssl.artifacts.header import (
    LENGTH_BYTES,
    Header,
    TensorEntry,
    check_header,
    header_bytes,
    header_length,
    in_file_order,
    parse_header,
    read_header,
    shown_name,
)
from fedssl.errors import ArtifactError, PlanMismatch
from fedssl.protocol.plan import DType, TensorSpec

Tensors = dict[str, torch.Tensor]

DTYPES: dict[torch.dtype, DType] = {getattr(torch, info.torch_name): name for name, info in INFO.items()}
TORCH_DTYPES: dict[DType, torch.dtype] = {name: dtype for dtype, name in DTYPES.items()}
_TORCH_DTYPES: dict[str, torch.dtype] = {name: dtype for dtype, name in DTYPES.items()}  # for names from a header


def in_name_order(tensors: Mapping[str, torch.Tensor]) -> Tensors:
    """Return the same tensors, ordered by name, detached, on the CPU and contiguous."""
    return {name: tensors[name].detach().to("cpu").contiguous() for name in sorted(tensors)}


def serialised(tensors: Mapping[str, torch.Tensor]) -> bytes:
    """Return the bytes of a safetensors file without metadata. Equal tensors give equal bytes."""
    # Cloned, because safetensors refuses tensors that share memory, as a target network may with its online one.
    return save({name: tensor.clone() for name, tensor in in_name_order(tensors).items()})


def serialised_parts(tensors: Mapping[str, torch.Tensor]) -> Iterator[bytes | memoryview]:
    """Yield `serialised(tensors)` in parts, without a copy of the tensors that are contiguous on the CPU."""
    ordered = in_file_order(
        [
            TensorSpec.model_construct(name=name, dtype=DTYPES[tensor.dtype], shape=tuple(tensor.shape))
            for name, tensor in tensors.items()  # they need not fit a plan's limits
        ]
    )
    yield header_bytes(ordered)
    for spec in ordered:
        tensor = tensors[spec.name].detach().to("cpu").contiguous()
        yield tensor.reshape(-1).view(torch.uint8).numpy().data


def save_tensors(tensors: Mapping[str, torch.Tensor], path: Path) -> None:
    """Write `serialised(tensors)` to a file."""
    path.write_bytes(serialised(tensors))


def load_tensors(path: Path) -> Tensors:
    """Read a whole file into memory, in name order."""
    with safe_open(path, framework="pt") as file:
        return {name: file.get_tensor(name) for name in sorted(file.keys())}


def read_tensors(path: Path, digest: str) -> Tensors:
    """Read a whole artifact into memory, in name order, and compare its bytes with its digest on the way.

    The tensors share one buffer, which is released with the last of them: clone what is kept for longer. Raises
    ArtifactDamaged unless the digest is that of the file's bytes.
    """
    return _tensors_in(read_checked(path, digest), digest)


class FileTensors(Mapping[str, torch.Tensor]):
    """The tensors of an open file, in name order. Each is read into separate memory when it is asked for.

    Their bytes are not compared with a digest, so use it only for files that this process has already verified. Raises
    ArtifactError if the file does not have the size that its header describes.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file.fileno()
        header = read_header(file)
        _check_size(header, os.fstat(self._file).st_size, file.name)
        self._start = header.data_start
        self._entries = {entry.name: entry for entry in sorted(header.entries, key=lambda entry: entry.name)}

    def __getitem__(self, name: str) -> torch.Tensor:
        entry = self._entries[name]
        return self._read(entry, entry.start, entry.stop).view(entry.shape)

    def pieces(self, name: str, size: int) -> Iterator[torch.Tensor]:
        """Yield a flattened tensor in pieces of `size` numbers. Each is read when it is reached."""
        entry = self._entries[name]
        step = size * ITEM_SIZES[entry.dtype]
        for start in range(entry.start, max(entry.stop, entry.start + 1), step):  # an empty tensor is one empty piece
            yield self._read(entry, start, min(start + step, entry.stop))

    def _read(self, entry: TensorEntry, start: int, stop: int) -> torch.Tensor:
        found = torch.empty((stop - start) // ITEM_SIZES[entry.dtype], dtype=_TORCH_DTYPES[entry.dtype])
        left, position = found.view(torch.uint8).numpy().data, self._start + start
        while left:
            count = os.preadv(self._file, [left], position)
            if not count:
                raise ArtifactError(f"the file ends within tensor {shown_name(entry.name)}: it was cut off meanwhile")
            left, position = left[count:], position + count
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)


def _check_size(header: Header, size: int, what: str) -> None:
    if header.total_bytes != size:
        raise ArtifactError(f"{what} has {size} bytes, but its header describes {header.total_bytes}")


def _tensors_in(whole: NDArray[np.uint8], digest: str) -> Tensors:
    start = LENGTH_BYTES + header_length(whole[:LENGTH_BYTES].tobytes(), len(whole))
    header = parse_header(whole[LENGTH_BYTES:start].tobytes())
    _check_size(header, len(whole), f"artifact {digest}")
    entries = sorted(header.entries, key=lambda entry: entry.name)
    return {
        entry.name: torch.from_numpy(whole[start + entry.start : start + entry.stop])
        .view(_TORCH_DTYPES[entry.dtype])
        .view(entry.shape)
        for entry in entries
    }


def check_file(path: Path, tensors: tuple[TensorSpec, ...], what: str) -> None:
    """Raise PlanMismatch unless the file holds exactly the declared tensors."""
    with path.open("rb") as file:
        check_header(read_header(file), tensors, what)


def check_tensors(tensors: Mapping[str, torch.Tensor], declared: tuple[TensorSpec, ...], what: str) -> None:
    """Raise PlanMismatch unless these are exactly the declared tensors."""
    want = {spec.name: (spec.dtype, spec.shape) for spec in declared}
    got = {name: (DTYPES.get(tensor.dtype), tuple(tensor.shape)) for name, tensor in tensors.items()}
    if wrong := sorted(name for name in want.keys() | got.keys() if want.get(name) != got.get(name)):
        name = wrong[0]
        raise PlanMismatch(
            f"the {what} does not match the method's artifact plan: {name} is {got.get(name, 'missing')}, "
            f"declared {want.get(name, 'nowhere')}" + (f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else "")
        )
