"""Reads files of weights from other libraries, with every check, and writes the one form that is registered.

The registered form is a safetensors file without metadata, as the safetensors library writes it: the names are those of
`weight_names.py`, numbers are float32, and the counters of BatchNorm int64. Equal tensors give equal bytes, whatever
library the file came from, and so one digest. This module does not import torch, because the API process checks these
files with it.
"""

import math
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError

from fedssl.artifacts.dtypes import INFO
from fedssl.artifacts.header import (
    Header,
    TensorEntry,
    check_form,
    header_bytes,
    in_file_order,
    read_header,
    shown_name,
)
from fedssl.artifacts.store import digest_of, digest_of_parts
from fedssl.artifacts.weight_names import PREFIX, Family, encoder_name, family_of
from fedssl.errors import ArtifactError, NotFinite
from fedssl.files import replaced_file
from fedssl.protocol.plan import DType, TensorSpec

MAX_TENSORS = 8192
MAX_HEADER_BYTES = 64 + 512 * MAX_TENSORS
"""The longest header of a registered file. Other libraries' may be longer, because of their metadata."""

MAX_FILE_BYTES = 8 << 30
COUNTER = ".num_batches_tracked"
"""The end of the name of a network's only kind of integer tensor, with which BatchNorm counts batches."""

LEAST_VARIANCE = -1e-6
"""The lowest variance of BatchNorm that rounding can lead to: a mean in fixed-point arithmetic can be below the least
of its values, so the weights of a run may have a variance a little below 0."""

_VARIANCE = ".running_var"
_NUMPY: dict[str, str] = {name: info.numpy_name for name, info in INFO.items()}
_MAX_FOREIGN_HEADER_BYTES = 16 << 20
_ZIP, _PICKLE = b"PK\x03\x04", 0x80  # torch.save writes a zip of pickles since 1.6, and wrote a bare pickle before
_CONVERSION = (
    "import sys, torch; from safetensors.torch import save_file; "
    "found = torch.load(open(sys.argv[1], 'rb'), map_location='cpu', weights_only=True); "
    "found = found.get('state_dict', found); "
    "save_file({name: each.clone().contiguous() for name, each in found.items()}, sys.argv[2])"
)
_HALVES = {"F16": "torch.float16", "BF16": "torch.bfloat16"}
_WIDENING = (
    "import sys, torch; from safetensors.torch import load_file, save_file; "
    f"halves = ({', '.join(_HALVES.values())}); "
    "save_file({name: each.float() if each.dtype in halves else each "
    "for name, each in load_file(sys.argv[1]).items()}, sys.argv[2])"
)


@dataclass(frozen=True, slots=True)
class Weights:
    """The tensors of an encoder, by the names that they have in a fedssl model.

    `family` is the origin of the file's names, and `left_out` are the tensors of the file that belong to no encoder.
    `source_digest` is the sha256 of the file that was read.
    """

    arrays: dict[str, NDArray[Any]]
    family: Family
    left_out: tuple[str, ...]
    source_digest: str

    @property
    def num_parameters(self) -> int:
        """Return the number of values, without the counters of BatchNorm."""
        return sum(array.size for name, array in self.arrays.items() if not name.endswith(COUNTER))


def read_weights(path: Path) -> Weights:
    """Read a safetensors file with the names of fedssl, torchvision, timm or Hugging Face's ResNets.

    Only F32 is read, so that the registered file has the same numbers, bit for bit.

    Raises:
        ArtifactError: the file is pickled, damaged or too large, or has a dtype or names that no encoder can have, or
            negative variances.
        NotFinite: a tensor holds NaN or infinity.
        OSError: the file cannot be read.
    """
    with path.open("rb") as file:
        _refuse_pickles(path, file.read(16))
        file.seek(0)
        header = _header(path, file)
        family = family_of(entry.name for entry in header.entries)
        named = _named(path, header.entries, family)
        arrays = {name: _array(path, file, header, entry) for name, entry in sorted(named.items())}
    used = {entry.name for entry in named.values()}
    left_out = tuple(sorted(entry.name for entry in header.entries if entry.name not in used))
    return Weights(arrays, family, left_out, digest_of(path))


def write_weights(weights: Weights, destination: Path) -> str:
    """Write the registered form, and return its sha256."""
    with replaced_file(destination) as incoming, incoming.open("wb") as file:
        return digest_of_parts(_serialised(weights), file.write)


def registered_digest(weights: Weights) -> str:
    """Return the sha256 of the file that `write_weights` would write."""
    return digest_of_parts(_serialised(weights))


def check_registered(header: Header) -> int:
    """Return the number of parameters of a registered file. Raises ArtifactError if it has another form."""
    if not 0 < len(header.entries) <= MAX_TENSORS:
        raise ArtifactError(f"weights have 1 to {MAX_TENSORS} tensors; these have {len(header.entries)}")
    for entry in header.entries:
        if not entry.name.startswith(PREFIX) or entry.dtype != _registered_dtype(entry.name):
            raise ArtifactError(
                f"tensor {shown_name(entry.name)} is {entry.dtype}: registered weights have names that begin with "
                f"{PREFIX} and numbers in F32, as `fedssl weights add` writes them"
            )
    check_form(header, [_spec(entry.name, entry.shape) for entry in header.entries], "file of weights")
    return sum(math.prod(entry.shape) for entry in header.entries if not entry.name.endswith(COUNTER))


def conversion_command(path: Path) -> str:
    """Return the command that converts a pickled file, in a process without network that loads only tensors."""
    return shlex.join(
        ["unshare", "--map-root-user", "--net", "python", "-c", _CONVERSION, str(path), str(_converted(path))]
    )


def widening_command(path: Path) -> str:
    """Return the command that converts a safetensors file's tensors of half precision to float32, which is exact."""
    return shlex.join(["python", "-c", _WIDENING, str(path), str(_converted(path))])


def _converted(path: Path) -> Path:
    stem = f"{path.stem}-converted" if path.suffix == ".safetensors" else path.stem
    return path.with_name(f"{stem}.safetensors")


def _refuse_pickles(path: Path, beginning: bytes) -> None:
    is_bare = len(beginning) > 8 and beginning[0] == _PICKLE and beginning[1] in range(2, 6) and beginning[8:9] != b"{"
    if beginning.startswith(_ZIP) or is_bare:
        raise ArtifactError(
            f"{path} is pickled, and unpickling may run any program that is hidden in it: fedssl reads only "
            "safetensors. Convert it with this command, whose process has no network and loads only tensors:\n"
            f"{conversion_command(path)}"
        )


def _header(path: Path, file: BinaryIO) -> Header:
    size = path.stat().st_size
    if size > MAX_FILE_BYTES:
        raise ArtifactError(f"{path} has {size:,} bytes; weights may have at most {MAX_FILE_BYTES:,}")
    try:
        header = read_header(file, _MAX_FOREIGN_HEADER_BYTES, allow_metadata=True)
    except ArtifactError as error:
        raise type(error)(f"{path} is not a safetensors file of weights: {error}") from None
    if header.total_bytes != size:
        raise ArtifactError(
            f"{path} has {size:,} bytes, but its header describes {header.total_bytes:,}: fetch or write it again"
        )
    return header


def _named(path: Path, entries: Sequence[TensorEntry], family: Family) -> dict[str, TensorEntry]:
    """Return the tensors by their names in a fedssl model, without those that belong to no encoder."""
    named: dict[str, TensorEntry] = {}
    for entry in entries:
        name = encoder_name(entry.name, family)
        if name is None:
            continue
        if name in named:
            raise ArtifactError(f"{path}: {named[name].name} and {entry.name} are the same tensor, {name}")
        _check_entry(path, name, entry)
        named[name] = entry
    if not 0 < len(named) <= MAX_TENSORS:
        raise ArtifactError(f"{path} has {len(named)} tensors of an encoder; 1 to {MAX_TENSORS} are possible")
    return named


def _check_entry(path: Path, name: str, entry: TensorEntry) -> None:
    what = f"{path}: tensor {shown_name(entry.name)}"
    try:
        _spec(name, entry.shape)
    except ValidationError:
        raise ArtifactError(f"{what} has a name that no encoder can have: use letters, digits, _ and dots") from None
    if name.endswith(COUNTER):
        if entry.dtype != "I64":
            raise ArtifactError(f"{what} counts batches and is {entry.dtype}; it must be I64")
    elif entry.dtype == "F64":
        raise ArtifactError(f"{what} is F64, which float32 cannot hold exactly: convert the weights to F32 first")
    elif entry.dtype in _HALVES:
        raise ArtifactError(
            f"{what} is {entry.dtype}: encoders start in F32. Convert the file, which changes no number, with this "
            f"command:\n{widening_command(path)}"
        )
    elif entry.dtype != "F32":
        raise ArtifactError(
            f"{what} is {entry.dtype}: an encoder is trained in floating point, so give the weights before quantisation"
        )


def _array(path: Path, file: BinaryIO, header: Header, entry: TensorEntry) -> NDArray[Any]:
    """Read a tensor. Raises NotFinite."""
    file.seek(header.data_start + entry.start)
    data = file.read(entry.stop - entry.start)
    if len(data) != entry.stop - entry.start:
        raise ArtifactError(f"{path} ends within tensor {entry.name}")
    found: NDArray[Any] = np.frombuffer(data, _NUMPY[entry.dtype])
    if entry.dtype != "I64" and not np.isfinite(found).all():
        raise NotFinite(
            f"{path}: tensor {shown_name(entry.name)} holds NaN or infinity: no training can start from these weights"
        )
    if entry.name.endswith(_VARIANCE) and found.min(initial=0) < LEAST_VARIANCE:
        raise ArtifactError(
            f"{path}: tensor {shown_name(entry.name)} holds {found.min():.6g}, and no variance is negative: BatchNorm "
            "would give NaN. Fetch or write the weights again"
        )
    return found.reshape(entry.shape)


def _registered_dtype(name: str) -> DType:
    return "I64" if name.endswith(COUNTER) else "F32"


def _spec(name: str, shape: tuple[int, ...]) -> TensorSpec:
    return TensorSpec(name=name, dtype=_registered_dtype(name), shape=shape)


def _serialised(weights: Weights) -> Iterator[bytes]:
    specs = in_file_order([_spec(name, array.shape) for name, array in weights.arrays.items()])
    yield header_bytes(specs)
    for spec in specs:
        yield weights.arrays[spec.name].tobytes()
