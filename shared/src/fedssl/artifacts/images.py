"""Files of images: a whole data set as one safetensors file, written and read in parts.

A *public* set has one tensor, `images`: U8 (N, C, S, S). A *labelled* set has `train_images` and `test_images` like it,
`train_labels` and `test_labels`: I64 (N,), and, if its classes have names, `class_names`: U8, a JSON list.
C is 1 or 3, S the height and width in pixels. Equal images give equal bytes, those that the safetensors library writes.
This module does not import torch, because the API process checks these files.
"""

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from fedssl.artifacts.checked import CHUNK, CheckedFile, checked_file
from fedssl.artifacts.header import (
    LENGTH_BYTES,
    Header,
    TensorEntry,
    header_bytes,
    header_length,
    parse_header,
    read_header,
)
from fedssl.artifacts.store import digest_of_parts
from fedssl.errors import ArtifactError, FedSSLError
from fedssl.protocol.plan import TensorSpec

MAX_HEADER_BYTES = 4096
MIN_SIZE, MAX_SIZE = 8, 512
MAX_CLASSES = 65_536
MAX_NAMES_BYTES = 1 << 20
_PUBLIC = frozenset({"images"})
_LABELLED = frozenset({"train_images", "train_labels", "test_images", "test_labels"})
_CLASS_NAMES = "class_names"
_NUMPY: dict[str, np.dtype[Any]] = {"U8": np.dtype(np.uint8), "I64": np.dtype("<i8")}

T = TypeVar("T")

Choose = Callable[[int], NDArray[np.int64]]
"""Returns the sorted indices of the images to read, from how many images there are."""


@dataclass(frozen=True, slots=True)
class PublicShape:
    """The values in the header of a public set."""

    num_images: int
    channels: Literal[1, 3]
    image_size: int


@dataclass(frozen=True, slots=True)
class LabelledShape:
    """The values in the header of a labelled set."""

    num_train: int
    num_test: int
    channels: Literal[1, 3]
    image_size: int


@dataclass(frozen=True, slots=True)
class LabelledArrays:
    """A labelled set. `class_names` are the classes by number, or empty if they have no names."""

    train_images: NDArray[np.uint8]
    train_labels: NDArray[np.int64]
    test_images: NDArray[np.uint8]
    test_labels: NDArray[np.int64]
    class_names: tuple[str, ...]

    @property
    def num_classes(self) -> int:
        """Return the number of class names, or one more than the largest label if there are none."""
        return len(self.class_names) or 1 + max(int(self.train_labels.max()), int(self.test_labels.max()))


@dataclass(frozen=True, slots=True)
class Stream:
    """A tensor that comes in parts, split along its first dimension."""

    spec: TensorSpec
    parts: Iterable[NDArray[Any]]


def public_shape(header: Header) -> PublicShape:
    """Return the shape of a public set. Raises ArtifactError if the header is not that of one."""
    entries = {entry.name: entry for entry in header.entries}
    if entries.keys() != _PUBLIC:
        raise ArtifactError("the file is not a public data set, which has one tensor, images")
    return PublicShape(*_images(entries["images"]))


def labelled_shape(header: Header) -> LabelledShape:
    """Return the shape of a labelled set. Raises ArtifactError if the header is not that of one."""
    entries = {entry.name: entry for entry in header.entries}
    if entries.keys() - {_CLASS_NAMES} != _LABELLED:
        raise ArtifactError(f"the file is not a labelled data set, which has tensors {', '.join(sorted(_LABELLED))}")
    (num_train, *shape), (num_test, *other) = _images(entries["train_images"]), _images(entries["test_images"])
    if shape != other:
        raise ArtifactError("training and test images differ in channels or size")
    for name, count in (("train_labels", num_train), ("test_labels", num_test)):
        if (entries[name].dtype, entries[name].shape) != ("I64", (count,)):
            raise ArtifactError(f"{name} must be one I64 number per image, shape [{count}]")
    if (names := entries.get(_CLASS_NAMES)) is not None and not _is_text(names):
        raise ArtifactError(f"{_CLASS_NAMES} must be at most {MAX_NAMES_BYTES} U8 in one dimension")
    return LabelledShape(num_train, num_test, *_images(entries["train_images"])[1:])


def data_set_shape(header: Header) -> PublicShape | LabelledShape:
    """Return the shape of the data set that a header describes. Raises ArtifactError if it is of neither kind."""
    names = {entry.name for entry in header.entries}
    if names == _PUBLIC:
        return public_shape(header)
    if names - {_CLASS_NAMES} == _LABELLED:
        return labelled_shape(header)
    raise ArtifactError(
        "the file is not a data set: make it with `fedssl public-dataset add` or `fedssl evaluation-dataset add`"
    )


def map_public(path: Path) -> NDArray[np.uint8]:
    """Return the images of a public set, memory-mapped. Raises ArtifactError if the file is not one."""
    header = _checked_header(path)
    public_shape(header)
    return _map(path, header, header.entries[0])


def map_labelled(path: Path) -> LabelledArrays:
    """Return a labelled set, memory-mapped. Raises ArtifactError if the file is not one, or its labels are invalid."""
    header = _checked_header(path)
    labelled_shape(header)
    return _labelled({entry.name: _map(path, header, entry) for entry in header.entries})


def read_public(path: Path, digest: str, choose: Choose) -> NDArray[np.uint8]:
    """Read the chosen images of a public set. The whole file is compared with its digest on the way, in one pass.

    Only the chosen images are in memory. Raises ArtifactDamaged, ArtifactError if the file is not a public set, and
    what `choose` raises.
    """

    def read(file: CheckedFile) -> NDArray[np.uint8]:
        header = _read_header(path, file)
        return _read_rows(file, header.entries[0], choose(public_shape(header).num_images))

    return _checked(path, digest, read)


def read_labelled(path: Path, digest: str, choose_train: Choose, choose_test: Choose) -> LabelledArrays:
    """Read the chosen images of a labelled set, and their labels, like `read_public`."""

    def read(file: CheckedFile) -> LabelledArrays:
        header = _read_header(path, file)
        shape = labelled_shape(header)
        train, test = choose_train(shape.num_train), choose_test(shape.num_test)
        chosen = {"train_images": train, "test_images": test}
        arrays = {
            entry.name: _read_rows(file, entry, chosen.get(entry.name, np.arange(entry.shape[0])))
            for entry in header.entries
        }
        found = _labelled(arrays)
        return replace(found, train_labels=found.train_labels[train], test_labels=found.test_labels[test])

    return _checked(path, digest, read)


def _labelled(found_arrays: Mapping[str, NDArray[Any]]) -> LabelledArrays:
    """Return a labelled set from its tensors. Raises ArtifactError if the labels are invalid."""
    arrays = dict(found_arrays)
    names = _class_names(arrays.pop(_CLASS_NAMES).tobytes()) if _CLASS_NAMES in arrays else ()
    found = LabelledArrays(**arrays, class_names=names)
    lowest = min(int(found.train_labels.min()), int(found.test_labels.min()))
    highest = max(int(found.train_labels.max()), int(found.test_labels.max()))
    if lowest < 0 or highest >= (len(names) or MAX_CLASSES):
        raise ArtifactError(f"labels must be 0 to {(len(names) or MAX_CLASSES) - 1}; they are {lowest} to {highest}")
    return found


def public_streams(shape: PublicShape, parts: Iterable[NDArray[np.uint8]]) -> list[Stream]:
    """Return the one tensor of a public set."""
    return [_image_stream("images", shape.num_images, shape, parts)]


def labelled_streams(
    shape: LabelledShape,
    train: Iterable[NDArray[np.uint8]],
    train_labels: NDArray[np.int64],
    test: Iterable[NDArray[np.uint8]],
    test_labels: NDArray[np.int64],
    class_names: Sequence[str] = (),
) -> list[Stream]:
    """Return the tensors of a labelled set in the order of the library: wide elements first, then by name."""
    streams = [
        _stream("test_labels", "I64", test_labels.shape, [test_labels]),
        _stream("train_labels", "I64", train_labels.shape, [train_labels]),
        _image_stream("test_images", shape.num_test, shape, test),
        _image_stream("train_images", shape.num_train, shape, train),
    ]
    if class_names:
        text = np.frombuffer(json.dumps(list(class_names)).encode(), np.uint8)
        streams.insert(2, _stream(_CLASS_NAMES, "U8", text.shape, [text]))
    return streams


def write_streams(path: Path, streams: Sequence[Stream]) -> str:
    """Write a file, with at most one part of it in memory, and return its sha256."""
    with path.open("wb") as file:
        return digest_of_parts(_serialised(streams), file.write)


def streams_digest(streams: Sequence[Stream]) -> str:
    """Return the sha256 of the file that `write_streams` would write."""
    return digest_of_parts(_serialised(streams))


def _serialised(streams: Sequence[Stream]) -> Iterator[bytes | memoryview]:
    yield header_bytes([stream.spec for stream in streams])
    for stream in streams:
        rows = 0
        for part in stream.parts:
            if part.shape[1:] != stream.spec.shape[1:]:
                raise ValueError(f"{stream.spec.name}: a part has shape {part.shape}, the whole {stream.spec.shape}")
            rows += len(part)
            yield np.ascontiguousarray(part, _NUMPY[stream.spec.dtype]).data.cast("B")
        if rows != stream.spec.shape[0]:
            raise ValueError(f"{stream.spec.name}: the parts have {rows} rows, the whole {stream.spec.shape[0]}")


def _stream(name: str, dtype: Literal["U8", "I64"], shape: tuple[int, ...], parts: Iterable[NDArray[Any]]) -> Stream:
    return Stream(TensorSpec(name=name, dtype=dtype, shape=shape), parts)


def _image_stream(
    name: str, count: int, shape: PublicShape | LabelledShape, parts: Iterable[NDArray[np.uint8]]
) -> Stream:
    return _stream(name, "U8", (count, shape.channels, shape.image_size, shape.image_size), parts)


def _checked_header(path: Path) -> Header:
    with path.open("rb") as file:
        header = read_header(file, MAX_HEADER_BYTES)
    _check_size(path, header, path.stat().st_size)
    return header


def _check_size(path: Path, header: Header, size: int) -> None:
    if header.total_bytes != size:
        raise ArtifactError(f"{path.name} has another size than its header declares: download or make it again")


def _checked(path: Path, digest: str, read: Callable[[CheckedFile], T]) -> T:
    """Read a file once. Raises ArtifactDamaged if the digest differs, instead of any other error."""
    with checked_file(path) as file:
        try:
            found = read(file)
        except FedSSLError:
            file.require(digest)
            raise
        file.require(digest)
    return found


def _read_header(path: Path, file: CheckedFile) -> Header:
    length = header_length(file.read(LENGTH_BYTES).tobytes(), MAX_HEADER_BYTES)
    header = parse_header(file.read(length).tobytes())
    _check_size(path, header, file.size)
    return header


def _read_rows(file: CheckedFile, entry: TensorEntry, chosen: NDArray[np.int64]) -> NDArray[Any]:
    """Read the next tensor of the file, and return the chosen rows of it. `chosen` is sorted."""
    dtype, row = _NUMPY[entry.dtype], entry.shape[1:]
    rows = np.empty((len(chosen), *row), dtype)
    row_bytes = dtype.itemsize * math.prod(row)
    at_once = max(1, CHUNK // row_bytes)
    for start in range(0, entry.shape[0], at_once):
        part = file.read(min(at_once, entry.shape[0] - start) * row_bytes).view(dtype).reshape(-1, *row)
        first, last = np.searchsorted(chosen, (start, start + len(part)))
        rows[first:last] = part[chosen[first:last] - start]
    return rows


def _images(entry: TensorEntry) -> tuple[int, Literal[1, 3], int]:
    """Return the number, channels and size of the images. Raises ArtifactError."""
    if entry.dtype == "U8" and len(entry.shape) == 4:
        count, channels, height, width = entry.shape
        if count > 0 and channels in (1, 3) and height == width and MIN_SIZE <= width <= MAX_SIZE:
            return count, 1 if channels == 1 else 3, width
    raise ArtifactError(
        f"{entry.name} must be U8 images [N, C, S, S], C 1 or 3, S {MIN_SIZE} to {MAX_SIZE}; "
        f"it is {entry.dtype}{list(entry.shape)}"
    )


def _is_text(entry: TensorEntry) -> bool:
    return entry.dtype == "U8" and len(entry.shape) == 1 and 0 < entry.shape[0] <= MAX_NAMES_BYTES


def _map(path: Path, header: Header, entry: TensorEntry) -> NDArray[Any]:
    offset = header.data_start + entry.start
    return np.memmap(path, _NUMPY[entry.dtype], "r", offset, entry.shape).view(np.ndarray)


def _class_names(text: bytes) -> tuple[str, ...]:
    try:
        names = json.loads(text)
    except (ValueError, RecursionError):
        names = None
    if not isinstance(names, list) or not 0 < len(names) <= MAX_CLASSES or not all(_is_whole_text(n) for n in names):
        raise ArtifactError(f"{_CLASS_NAMES} must be a JSON list of at most {MAX_CLASSES} names in UTF-8 without NUL")
    return tuple(names)


def _is_whole_text(name: object) -> bool:
    """Return whether a name can be stored.

    JSON can hold half a character (`\\ud800`), which nothing else can, and NUL, which Postgres refuses.
    """
    if not isinstance(name, str) or "\0" in name:
        return False
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True
