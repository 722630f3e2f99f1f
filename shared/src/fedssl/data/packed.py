"""Files that hold many images: `.npz` arrays, tar shards (WebDataset) and Parquet with a column of images.

Nothing is unpacked to disk. Image number k, from 1, is the k-th row of `images` in an `.npz` file, the k-th image file
of a tar archive, or the k-th row of a Parquet file. Labels and groups inside these files are not read: the class of an
image is the sub-folder, as for every other file.
"""

import functools
import io
import tarfile
import threading
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedssl.data import format_packages
from fedssl.data.array_files import ARRAY_ERRORS, check_members

PACKED_SUFFIXES = (".npz", ".tar", ".parquet")

MAX_MEMBER_BYTES = 256 << 20
"""The largest size of one image's file in an archive, and of a group of rows in a Parquet file."""

_MEMBERS = (".jpg", ".jpeg", ".png", ".webp", ".bmp")
_COLUMNS = ("image", "img", "jpg", "jpeg", "png", "webp")
_MOST_IMAGES = 1_000_000
_READ_AT_ONCE = 1 << 20
_LOADING = threading.Lock()  # several threads read images of one file, which is opened once


@dataclass(frozen=True, slots=True)
class _Member:
    offset: int
    size: int


def count_images(path: Path) -> int:
    """Return the number of images in a file. Raises ValueError if the file cannot be read."""
    suffix = path.suffix.lower()
    if suffix == ".npz":
        return int(_explained(_shape, path)[0])
    return len(_explained(_members if suffix == ".tar" else _rows, path))


def open_image(path: Path, number: int | None) -> io.BytesIO:
    """Return the file of one image, for PIL, or an array of NumPy if the suffix is `.npz`. Raises ValueError.

    `number` counts from 1.
    """
    suffix = path.suffix.lower()
    read = {".npz": _row_of_array, ".tar": _member_of, ".parquet": _cell_of}[suffix]
    found: io.BytesIO = _explained(lambda path, stamp: read(path, stamp, (number or 0) - 1), path)
    return found


def release() -> None:
    """Free the memory of the array or the rows that were loaded last."""
    _arrays.cache_clear()
    _group.cache_clear()


def _explained(read: Any, path: Path) -> Any:
    """Call `read` with the path and its stamp. Every error becomes a ValueError with a reason."""
    try:
        status = path.stat()
        with _LOADING:
            return read(path, f"{status.st_size} {status.st_mtime_ns} {status.st_ctime_ns}")
    except (*ARRAY_ERRORS, tarfile.TarError, LookupError, AttributeError) as error:
        raise ValueError(str(error) or type(error).__name__) from error
    except Exception as error:
        if type(error).__module__.partition(".")[0] == "pyarrow":
            raise ValueError(str(error) or type(error).__name__) from error
        raise


def _require(number: int, count: int) -> None:
    if not 0 <= number < count:
        raise ValueError(f"it has {count:,} images, and number {number + 1:,} is wanted; it changed, or is damaged")


@functools.lru_cache(maxsize=64)
def _shape(path: Path, stamp: str) -> tuple[int, ...]:
    """Return the shape of the array `images`. Reads only its header."""
    check_members(path)
    with zipfile.ZipFile(path) as archive:
        members = {member.filename.removesuffix(".npy"): member for member in archive.infolist()}
        if "images" not in members:
            raise ValueError("it has no array `images`")
        if "window" in members:
            raise ValueError("its images have been through a window: give the file by its own path")
        with archive.open(members["images"]) as file:
            is_short = np.lib.format.read_magic(file) == (1, 0)
            read = np.lib.format.read_array_header_1_0 if is_short else np.lib.format.read_array_header_2_0
            shape, _, dtype = read(file)
            num_bytes = file.tell() + np.broadcast_to(np.empty((), dtype), shape).nbytes  # refuses impossible sizes
    if num_bytes != members["images"].file_size:
        raise ValueError(f"`images` takes {num_bytes:,} bytes by its header: it is damaged, or not an array of numbers")
    if len(shape) not in (3, 4) or shape[0] > _MOST_IMAGES:
        raise ValueError(f"`images` has the shape {shape}; (N, H, W), (N, H, W, C) or (N, C, H, W) is read")
    return tuple(shape)


@functools.lru_cache(maxsize=1)
def _arrays(path: Path, stamp: str) -> NDArray[Any]:
    _shape(path, stamp)
    with np.load(path, allow_pickle=False) as archive:
        images: NDArray[Any] = archive["images"]
    return images


def _row_of_array(path: Path, stamp: str, number: int) -> io.BytesIO:
    images = _arrays(path, stamp)
    _require(number, len(images))
    found = io.BytesIO()
    np.save(found, images[number], allow_pickle=False)
    found.seek(0)
    return found


@functools.lru_cache(maxsize=64)
def _members(path: Path, stamp: str) -> tuple[_Member, ...]:
    found: dict[str, _Member] = {}
    with tarfile.open(path, "r:") as archive:
        for member in archive:
            is_hidden = member.name.rpartition("/")[2].startswith(".")  # such as `._1.png`, which macOS adds
            if is_hidden or not member.name.lower().endswith(_MEMBERS):
                continue
            if member.islnk() or member.issym():
                raise ValueError(f"{member.name} in it is a link: write it with `tar --dereference --hard-dereference`")
            if member.issparse():  # its bytes in the archive are not the file's
                raise ValueError(f"{member.name} in it is stored without its zeros: write it without `tar --sparse`")
            if member.isfile():
                if member.name in found:  # appended by `tar -r` or `tar -u`; unpacked, only the last would be left
                    raise ValueError(f"{member.name} is in it twice: write it again with one file per name")
                found[member.name] = _Member(member.offset_data, member.size)
        _require_end(path, archive.offset)
    last = max((member.offset + member.size for member in found.values()), default=0)
    if last > path.stat().st_size or len(found) > _MOST_IMAGES:
        raise ValueError("it ends before its last image: it is truncated")
    return tuple(found.values())


def _require_end(path: Path, offset: int) -> None:
    """Raise ValueError unless a tar archive's end is marked at `offset`, where tarfile has stopped.

    tarfile stops without an error at a header that is damaged or cut short.
    """
    with path.open("rb") as file:
        file.seek(offset)
        if file.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):
            raise ValueError("its end is not marked: it is truncated or damaged, so it may have had more images")
        while part := file.read(_READ_AT_ONCE):
            if any(part):
                raise ValueError("it has more after its marked end: it is damaged, or several archives in one file")


def _member_of(path: Path, stamp: str, number: int) -> io.BytesIO:
    members = _members(path, stamp)
    _require(number, len(members))
    member = members[number]
    if member.size > MAX_MEMBER_BYTES:
        raise ValueError(f"the image's file has {member.size:,} bytes; at most {MAX_MEMBER_BYTES:,} are read")
    with path.open("rb") as file:
        file.seek(member.offset)
        content = file.read(member.size)
    if len(content) != member.size:
        raise ValueError("it ends before this image: it is truncated")
    return io.BytesIO(content)


@dataclass(frozen=True, slots=True)
class _Table:
    """The images of a Parquet file: for each, its group of rows and its row there."""

    column: str
    places: tuple[tuple[int, int], ...]

    def __len__(self) -> int:
        return len(self.places)


@functools.lru_cache(maxsize=64)
def _rows(path: Path, stamp: str) -> _Table:
    format_packages.require("Parquet")
    import pyarrow as pa
    import pyarrow.parquet as pq

    with pq.ParquetFile(path) as file:
        column = next((name for name in _COLUMNS if name in file.schema_arrow.names), None)
        if column is None:
            raise ValueError(f"it has no column of images ({', '.join(_COLUMNS)})")
        kind = file.schema_arrow.field(column).type
        is_struct = pa.types.is_struct(kind) and kind.get_field_index("bytes") >= 0
        if not (is_struct or pa.types.is_binary(kind) or pa.types.is_large_binary(kind)):
            raise ValueError(f"its column {column} holds {kind}, and only the bytes of image files are read")
        num_rows = [file.metadata.row_group(number).num_rows for number in range(file.metadata.num_row_groups)]
    if (most := max(sum(num_rows), *num_rows, 0)) > _MOST_IMAGES:
        raise ValueError(f"it has {most:,} rows; at most {_MOST_IMAGES:,} are read. Split it")
    return _Table(column, tuple((group, row) for group, count in enumerate(num_rows) for row in range(count)))


@functools.lru_cache(maxsize=1)
def _group(path: Path, stamp: str, column: str, group: int) -> list[bytes | None]:
    import pyarrow.parquet as pq

    with pq.ParquetFile(path) as file:
        size = file.metadata.row_group(group).total_byte_size
        _require_group(size)
        found: list[bytes | None] = []
        num_bytes = 0
        # A group stores a repeated image once and may be far larger in memory, so it is read in parts.
        rows_at_once = min(1024, max(1, MAX_MEMBER_BYTES // max(1, size)))
        for part in file.iter_batches(rows_at_once, row_groups=[group], columns=[column]):
            cells = part.column(0).to_pylist()
            images = [cell.get("bytes") if isinstance(cell, dict) else cell for cell in cells]
            num_bytes += sum(len(image) for image in images if image is not None)
            _require_group(num_bytes)
            found += images
    return found


def _require_group(num_bytes: int) -> None:
    """Raise ValueError if a group of rows is too large."""
    if num_bytes > MAX_MEMBER_BYTES:
        raise ValueError(
            f"a group of rows has {num_bytes:,} bytes or more; at most {MAX_MEMBER_BYTES:,} are read. Write it with "
            "fewer rows per group"
        )


def _cell_of(path: Path, stamp: str, number: int) -> io.BytesIO:
    table = _rows(path, stamp)
    _require(number, len(table))
    group, row = table.places[number]
    content = _group(path, stamp, table.column, group)[row]
    if content is None:
        raise ValueError("this row has no bytes of an image")
    return io.BytesIO(content)
