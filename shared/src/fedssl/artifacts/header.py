"""Reads and checks the safetensors header before a single byte of the body is read.

The format is 8 bytes (little-endian length n), n bytes of JSON, then the tensors' bytes. The reader here is stricter
than the format: tensors follow one another without a gap or an overlap, and no metadata is allowed. A file that is
checked against a plan must also be written exactly as the safetensors library writes it: one set of tensors has one
form, and nothing can be hidden between them, in spaces, in the order of names or in the spelling of a letter.
"""

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from fedssl.artifacts.dtypes import FILE_ORDER, ITEM_SIZES
from fedssl.errors import ArtifactError, ArtifactTooLarge, PlanMismatch
from fedssl.protocol.plan import ArtifactPlan, TensorSpec

LENGTH_BYTES = 8
_METADATA = "__metadata__"
_BYTES_PER_ENTRY = 512  # enough for a name of 256 characters, a dtype, eight dimensions and two offsets
_NAMES_SHOWN = 5
_ORDINARY = re.compile(r"[A-Za-z0-9_.]{1,256}")


class Reader(Protocol):
    """An open file that is only read from."""

    def read(self, num_bytes: int, /) -> bytes: ...


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of a file; `start` and `stop` count bytes from the end of the header."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Header:
    """A file's tensors in the order of their bytes, and where those begin in the file."""

    entries: tuple[TensorEntry, ...]
    data_start: int
    text: bytes = field(default=b"", compare=False, repr=False)
    """The JSON as it was written, with the spaces that follow it."""

    @property
    def total_bytes(self) -> int:
        """Return the size that the whole file must have."""
        return self.data_start + (self.entries[-1].stop if self.entries else 0)


def max_header_bytes(tensors: Sequence[TensorSpec]) -> int:
    """Return the size of the largest header that a file of these tensors can need."""
    return 64 + _BYTES_PER_ENTRY * len(tensors)


def num_bytes(dtype: str, shape: Sequence[int]) -> int:
    """Return how many bytes a tensor takes in a file."""
    return ITEM_SIZES[dtype] * math.prod(shape)


def max_file_bytes(tensors: Sequence[TensorSpec]) -> int:
    """Return the size of the largest file that can hold exactly these tensors."""
    return LENGTH_BYTES + max_header_bytes(tensors) + sum(num_bytes(t.dtype, t.shape) for t in tensors)


def file_bytes(tensors: Sequence[TensorSpec]) -> int:
    """Return the size of the file that holds exactly these tensors, as the safetensors library writes it."""
    return len(header_bytes(in_file_order(tensors))) + sum(num_bytes(t.dtype, t.shape) for t in tensors)


def frozen_bytes(plan: ArtifactPlan) -> int:
    """Return the size of the file of frozen tensors, which each client receives once; 0 if there are none."""
    return file_bytes(plan.frozen) if plan.frozen else 0


def header_length(prefix: bytes, limit: int) -> int:
    """Return the header's length from a file's first 8 bytes. Raises ArtifactTooLarge above `limit`."""
    if len(prefix) < LENGTH_BYTES:
        raise ArtifactError("the file ends within its first 8 bytes: it is not a safetensors file")
    length = int.from_bytes(prefix[:LENGTH_BYTES], "little")
    if length > limit:
        raise ArtifactTooLarge(f"the header claims {length} bytes; at most {limit} are possible here")
    return length


def parse_header(text: bytes, *, allow_metadata: bool = False) -> Header:
    """Parse a header's JSON. Raises ArtifactError if it is not exactly in the strict form.

    The safetensors library can read everything that this accepts, so no file that the API accepts fails an aggregator.
    With `allow_metadata`, which is for files of other libraries, metadata is permitted and ignored.
    """
    if text[:1] != b"{":
        raise ArtifactError("the safetensors header is not a JSON object")
    try:
        document = json.loads(text.decode("utf-8"), object_pairs_hook=_no_duplicates, parse_int=_whole_number)
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError, ValueError) as error:
        raise ArtifactError(f"the safetensors header cannot be read: {error}") from None
    if allow_metadata:
        document.pop(_METADATA, None)
    if _METADATA in document:
        raise ArtifactError("the safetensors header carries __metadata__, which may not travel: save without it")
    entries = tuple(sorted((_entry(name, value) for name, value in document.items()), key=lambda e: (e.start, e.stop)))
    position = 0
    for entry in entries:
        if entry.start != position:
            raise ArtifactError(f"tensor {shown_name(entry.name)}: its bytes leave a gap or overlap another's")
        position = entry.stop
    return Header(entries=entries, data_start=LENGTH_BYTES + len(text), text=text)


def read_header(file: Reader, limit: int = 64 * 2**20, *, allow_metadata: bool = False) -> Header:
    """Read the header at the beginning of an open file. `allow_metadata` as for `parse_header`."""
    length = header_length(file.read(LENGTH_BYTES), limit)
    text = file.read(length)
    if len(text) < length:
        raise ArtifactError("the file ends within its header")
    return parse_header(text, allow_metadata=allow_metadata)


def header_bytes(tensors: Sequence[TensorSpec]) -> bytes:
    """Return the beginning of a file whose tensors have this order: the length, and the JSON padded to 8 bytes."""
    entries, position = {}, 0
    for tensor in tensors:
        end = position + num_bytes(tensor.dtype, tensor.shape)
        entries[tensor.name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": [position, end]}
        position = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % LENGTH_BYTES)
    return len(text).to_bytes(LENGTH_BYTES, "little") + text


def check_header(header: Header, tensors: Sequence[TensorSpec], what: str) -> None:
    """Raise PlanMismatch unless the header holds exactly the declared tensors; `what` names the file in the message.

    Raises ArtifactError if it is in another form than the one that the safetensors library writes.
    """
    declared = {t.name: t for t in tensors}
    present = {e.name: e for e in header.entries}
    problems = []
    if missing := sorted(declared.keys() - present.keys()):
        problems.append(f"missing: {_some(missing)}")
    if undeclared := sorted(present.keys() - declared.keys()):
        problems.append(f"not declared: {_some(undeclared)}")
    for name in sorted(declared.keys() & present.keys()):
        want, got = declared[name], present[name]
        if (want.dtype, want.shape) != (got.dtype, got.shape):
            problems.append(f"{name} is {got.dtype}{list(got.shape)}, declared {want.dtype}{list(want.shape)}")
    if problems:
        shown = "; ".join(problems[:_NAMES_SHOWN]) + ("; ..." if len(problems) > _NAMES_SHOWN else "")
        raise PlanMismatch(f"the {what} does not match the method's artifact plan: {shown}")
    check_form(header, tensors, what)


def check_form(header: Header, tensors: Sequence[TensorSpec], what: str) -> None:
    """Raise ArtifactError unless the header is written as the safetensors library writes the header of these tensors.

    `what` names the file in the message.
    """
    if header.text != header_bytes(in_file_order(tensors))[LENGTH_BYTES:]:
        raise ArtifactError(
            f"the {what}'s header has the right content, but not in the only permitted form: save the tensors with "
            "the safetensors library and change nothing afterwards"
        )


def in_file_order(tensors: Sequence[TensorSpec]) -> list[TensorSpec]:
    """Return the tensors in the order in which the safetensors library writes them."""
    return sorted(tensors, key=lambda tensor: (FILE_ORDER.index(tensor.dtype), tensor.name))


def _some(names: Sequence[str]) -> str:
    return ", ".join(map(shown_name, names[:_NAMES_SHOWN])) + (
        f" and {len(names) - _NAMES_SHOWN} more" * (len(names) > _NAMES_SHOWN)
    )


def shown_name(name: str) -> str:
    """Return a name of unknown origin in a form that is safe in a message."""
    return name if _ORDINARY.fullmatch(name) else repr(name[:80])


def _whole_number(digits: str) -> int:
    if digits == "-0":
        raise ValueError("-0 is not a size")
    return int(digits)


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a name occurs twice")
    return result


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


def _entry(name: str, value: object) -> TensorEntry:
    if any("\ud800" <= character <= "\udfff" for character in name):
        raise ArtifactError(f"tensor {shown_name(name)}: its name holds half a character")
    if not isinstance(value, dict) or value.keys() != {"dtype", "shape", "data_offsets"}:
        raise ArtifactError(f"tensor {shown_name(name)}: needs exactly dtype, shape and data_offsets")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in ITEM_SIZES:
        raise ArtifactError(f"tensor {shown_name(name)}: dtype must be one of {', '.join(ITEM_SIZES)}")
    if not isinstance(shape, list) or len(shape) > 8 or not all(_is_size(size) for size in shape):
        raise ArtifactError(f"tensor {shown_name(name)}: shape must be at most 8 sizes, none negative")
    if not _is_size(num_bytes(dtype, [size for size in shape if size])):
        raise ArtifactError(f"tensor {shown_name(name)}: its shape counts more bytes than can be addressed")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(_is_size(offset) for offset in offsets):
        raise ArtifactError(f"tensor {shown_name(name)}: data_offsets must be two byte positions")
    if offsets[1] - offsets[0] != num_bytes(dtype, shape):
        raise ArtifactError(f"tensor {shown_name(name)}: its offsets span another size than its dtype and shape")
    return TensorEntry(name=name, dtype=dtype, shape=tuple(shape), start=offsets[0], stop=offsets[1])
