"""Files of representations: Parquet with the columns `path` and `embedding`, or `.npz` with `paths` and `embeddings`.

Both hold one JSON document that describes them: under the key `fedssl` of a Parquet file's metadata, and as `about` in
an `.npz` file. They are written and read in parts; equal contents give equal bytes.
"""

import json
import zipfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedssl.data.array_files import ARRAY_ERRORS, check_members, memory_bytes
from fedssl.errors import DataError, ExportError
from fedssl.files import replaced_file
from fedssl.packages import is_installed
from fedssl.wording import reason_of

SUFFIXES = (".parquet", ".npz")
VERSION = 1
_KEY = b"fedssl"
_FIXED_DATE = (1980, 1, 1, 0, 0, 0)  # so that equal contents give equal bytes

Float32 = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Content:
    """The source of a file that is written.

    Attributes:
        about: the JSON document.
        num: the number of images.
        width: of a representation.
        names: returns the names of the images, in parts. It is called more than once.
        rows: the representations, float32 (n, width), in the same parts.
    """

    about: dict[str, Any]
    num: int
    width: int
    names: Callable[[], Iterable[Sequence[str]]]
    rows: Iterable[Float32]


@dataclass(frozen=True, slots=True)
class Index:
    """The content of a file: its JSON document, the images' names, and their representations, float32 (N, H)."""

    about: dict[str, Any]
    paths: list[str]
    representations: Float32


def require_format(path: Path) -> None:
    """Raise ExportError unless files of this name can be read and written here."""
    if path.suffix not in SUFFIXES:
        raise ExportError(f"{path}: the name of a file of representations must end in {' or '.join(SUFFIXES)}")
    if path.suffix == ".parquet" and not is_installed("pyarrow"):
        raise ExportError(
            f"{path}: Parquet needs pyarrow, which is not installed here: pip install 'fedssl[parquet]', or take a "
            "name that ends in .npz"
        )


def write_index(path: Path, content: Content) -> None:
    """Write a file in the format of its name, in memory that does not grow with the number of images."""
    content.about["version"] = VERSION
    with replaced_file(path, durable=True) as incoming:
        (_write_parquet if path.suffix == ".parquet" else _write_npz)(incoming, content)


def read_about(path: Path) -> dict[str, Any]:
    """Return the JSON document of a file. Raises DataError, ExportError."""
    with _Reader(path) as reader:
        return reader.about()


def read_index(path: Path) -> Index:
    """Read a whole file. Raises DataError, ExportError."""
    with _Reader(path) as reader:
        about = reader.about()
        paths, representations = reader.content()
        if representations.shape[1] != about["encoder"].get("width"):
            raise ValueError("its representations are not those of its encoder")
        return Index(about, paths, representations)


def _write_npz(path: Path, content: Content) -> None:
    longest = max((len(name) for part in content.names() for name in part), default=1)
    text = json.dumps(content.about)
    with zipfile.ZipFile(path, "w") as archive:
        names = (np.array(part, f"<U{longest}") for part in content.names())
        _write_array(archive, "about", f"<U{len(text)}", (), [np.array(text)])
        _write_array(archive, "paths", f"<U{longest}", (content.num,), names)
        _write_array(archive, "embeddings", "<f4", (content.num, content.width), content.rows)


def _write_array(
    archive: zipfile.ZipFile, name: str, dtype: str, shape: tuple[int, ...], parts: Iterable[NDArray[Any]]
) -> None:
    member = zipfile.ZipInfo(f"{name}.npy", _FIXED_DATE)
    with archive.open(member, "w", force_zip64=True) as file:
        np.lib.format.write_array_header_1_0(file, {"descr": dtype, "fortran_order": False, "shape": shape})
        for part in parts:
            file.write(np.ascontiguousarray(part).tobytes())


def _write_parquet(path: Path, content: Content) -> None:
    import pyarrow
    from pyarrow import parquet

    columns = {"path": pyarrow.string(), "embedding": pyarrow.list_(pyarrow.float32(), content.width)}
    schema = pyarrow.schema(columns, metadata={_KEY: json.dumps(content.about)})
    with parquet.ParquetWriter(path, schema, compression="zstd", use_dictionary=False) as writer:
        for names, rows in zip(content.names(), content.rows, strict=True):
            flat = pyarrow.FixedSizeListArray.from_arrays(pyarrow.array(rows.reshape(-1)), content.width)
            writer.write_table(pyarrow.table([pyarrow.array(names, pyarrow.string()), flat], schema=schema))


class _Reader:
    """An open file of either format. Whatever is wrong with the file becomes DataError."""

    def __init__(self, path: Path) -> None:
        require_format(path)
        self._path = path
        self._errors: tuple[type[Exception], ...] = ARRAY_ERRORS
        self._parquet = path.suffix == ".parquet"
        if self._parquet:
            import pyarrow

            self._errors += (pyarrow.ArrowException,)

    def __enter__(self) -> "_Reader":
        try:
            self._file = self._open()
        except self._errors as error:
            raise self._damaged(error) from error
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._file.close()
        if isinstance(error, self._errors):
            raise self._damaged(error) from error

    def about(self) -> dict[str, Any]:
        text = (self._file.schema_arrow.metadata or {})[_KEY] if self._parquet else str(self._file["about"])
        about = json.loads(text)
        if not isinstance(about, dict) or about.get("version") != VERSION:
            raise ValueError(f"its version is not {VERSION}: this installation cannot read it")
        if not all(isinstance(about.get(part), dict) for part in ("encoder", "preprocessing", "images")):
            raise ValueError("it does not describe its encoder and images")
        return about

    def content(self) -> tuple[list[str], Float32]:
        paths, h_NH = self._parquet_content() if self._parquet else self._npz_content()
        if h_NH.dtype != np.float32 or h_NH.ndim != 2 or not 0 < len(paths) == len(h_NH) or not np.isfinite(h_NH).all():
            raise ValueError("it does not hold a path and a finite representation per image")
        return paths, h_NH

    def _open(self) -> Any:
        if self._parquet:
            from pyarrow import parquet

            return parquet.ParquetFile(self._path)
        if not zipfile.is_zipfile(self._path):
            raise ValueError("it is not an .npz file" if self._path.exists() else "there is no such file")
        check_members(self._path)
        return np.load(self._path, allow_pickle=False)

    def _npz_content(self) -> tuple[list[str], Float32]:
        return [str(path) for path in self._file["paths"]], self._file["embeddings"]

    def _parquet_content(self) -> tuple[list[str], Float32]:
        from pyarrow.types import is_fixed_size_list

        kind = self._file.schema_arrow.field("embedding").type
        if not is_fixed_size_list(kind):
            raise ValueError("its column embedding does not have lists of one length")
        num, width = self._file.metadata.num_rows, kind.list_size
        if 4 * num * width > memory_bytes():
            raise ValueError(f"{num:,} representations of {width:,} numbers do not fit into this machine's memory")
        paths: list[str] = []
        h_NH = np.empty((num, width), np.float32)
        for rows in self._groups():
            h_NH[len(paths) : len(paths) + rows.num_rows] = (
                rows.column("embedding").combine_chunks().flatten().to_numpy().reshape(-1, width)
            )
            paths += map(str, rows.column("path").to_pylist())
        return paths, h_NH

    def _groups(self) -> Iterator[Any]:
        return (self._file.read_row_group(group) for group in range(self._file.num_row_groups))

    def _damaged(self, error: Exception) -> DataError:
        reason = reason_of(error)[:200]
        return DataError(
            f"{self._path} is not a file of representations that can be read ({reason}): make it with `fedssl embed`"
        )
