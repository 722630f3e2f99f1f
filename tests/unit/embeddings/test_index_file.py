"""Files of representations: equal contents give equal bytes, other programs read them, and bad ones are refused."""

import json
import zipfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet

from fedssl.embeddings.index_file import Content, read_about, read_index, write_index
from fedssl.errors import DataError

ROWS = np.random.default_rng(0).normal(size=(10, 4)).astype(np.float32)
NAMES = [f"ä/{number}.png" for number in range(10)]
ABOUT = {"encoder": {"sha256": "e", "width": 4}, "preprocessing": {}, "images": {"sha256": "i"}, "num_embedded": 10}
FORMATS = pytest.mark.parametrize("suffix", [".npz", ".parquet"])


def content() -> Content:
    def names() -> Iterator[list[str]]:
        yield from (NAMES[:6], NAMES[6:])

    return Content(dict(ABOUT), 10, 4, names, iter((ROWS[:6], ROWS[6:])))


@FORMATS
def test_written_contents_are_read_back_and_equal_contents_give_equal_bytes(tmp_path: Path, suffix: str) -> None:
    for name in "ab":
        write_index(tmp_path / f"{name}{suffix}", content())
    assert (tmp_path / f"a{suffix}").read_bytes() == (tmp_path / f"b{suffix}").read_bytes()
    found = read_index(tmp_path / f"a{suffix}")
    assert found.paths == NAMES
    assert np.array_equal(found.representations, ROWS)
    assert found.about == read_about(tmp_path / f"a{suffix}") == {**ABOUT, "version": 1}


def test_numpy_and_pyarrow_read_the_files_without_fedssl(tmp_path: Path) -> None:
    write_index(tmp_path / "a.npz", content())
    with np.load(tmp_path / "a.npz") as arrays:
        assert arrays["paths"].tolist() == NAMES
        assert np.array_equal(arrays["embeddings"], ROWS)
        assert json.loads(str(arrays["about"]))["num_embedded"] == 10
    write_index(tmp_path / "a.parquet", content())
    table = parquet.read_table(tmp_path / "a.parquet")
    assert table.column("path").to_pylist() == NAMES
    assert np.array_equal(np.array(table.column("embedding").to_pylist(), np.float32), ROWS)
    assert json.loads(table.schema.metadata[b"fedssl"])["num_embedded"] == 10


@FORMATS
@pytest.mark.parametrize("damage", ["missing", "empty", "short", "text"])
def test_files_that_hold_no_representations_are_refused(tmp_path: Path, suffix: str, damage: str) -> None:
    path = tmp_path / f"a{suffix}"
    write_index(path, content())
    whole = path.read_bytes()
    path.unlink()
    if damage != "missing":
        path.write_bytes({"empty": b"", "short": whole[: len(whole) // 2], "text": b"path,embedding\n"}[damage])
    with pytest.raises(DataError, match="fedssl embed"):
        read_index(path)


def npz(path: Path, **arrays: object) -> Path:
    np.savez(path, **arrays)  # type: ignore[arg-type]
    return path


@pytest.mark.parametrize(
    "arrays",
    [
        {"paths": np.array(NAMES), "embeddings": ROWS},
        {"paths": np.array(NAMES[1:]), "embeddings": ROWS, "about": json.dumps({**ABOUT, "version": 1})},
        {"paths": np.array(NAMES), "embeddings": ROWS * np.nan, "about": json.dumps({**ABOUT, "version": 1})},
        {"paths": np.array(NAMES), "embeddings": ROWS.astype(int), "about": json.dumps({**ABOUT, "version": 1})},
        {"paths": np.array([]), "embeddings": ROWS[:0], "about": json.dumps({**ABOUT, "version": 1})},
        {"paths": np.array(NAMES), "embeddings": ROWS, "about": json.dumps({**ABOUT, "version": 2})},
        {"paths": np.array(NAMES), "embeddings": ROWS, "about": json.dumps({"version": 1})},
        {"paths": np.array(NAMES), "embeddings": ROWS[:, :3], "about": json.dumps({**ABOUT, "version": 1})},
        {"paths": np.array(NAMES), "embeddings": ROWS, "about": "{"},
        {"paths": np.array(NAMES, object), "embeddings": ROWS, "about": json.dumps({**ABOUT, "version": 1})},
    ],
)
def test_arrays_that_do_not_fit_together_are_refused(tmp_path: Path, arrays: dict[str, object]) -> None:
    with pytest.raises(DataError, match="fedssl embed"):
        read_index(npz(tmp_path / "a.npz", **arrays))


def test_tables_with_other_columns_are_refused(tmp_path: Path) -> None:
    parquet.write_table(pyarrow.table({"path": NAMES}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match="fedssl embed"):
        read_index(tmp_path / "a.parquet")
    described = {b"fedssl": json.dumps({**ABOUT, "version": 1})}
    for columns in ({"path": NAMES}, {"path": NAMES, "embedding": NAMES}, {"path": NAMES, "embedding": ROWS.tolist()}):
        parquet.write_table(pyarrow.table(columns).replace_schema_metadata(described), tmp_path / "b.parquet")
        with pytest.raises(DataError, match="fedssl embed"):
            read_index(tmp_path / "b.parquet")


def test_an_array_larger_than_the_memory_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for suffix in (".npz", ".parquet"):
        write_index(tmp_path / f"a{suffix}", content())
        monkeypatch.setattr("fedssl.data.array_files.memory_bytes", lambda: 100)
        monkeypatch.setattr("fedssl.embeddings.index_file.memory_bytes", lambda: 100)
        with pytest.raises(DataError, match="memory"):
            read_index(tmp_path / f"a{suffix}")


def test_a_zip_archive_without_arrays_is_refused(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
        archive.writestr("about", "text")
    with pytest.raises(DataError, match="fedssl embed"):
        read_index(tmp_path / "a.npz")
