"""The folder store, as far as it differs from the other stores."""

import errno
import hashlib
import os
import shutil
from pathlib import Path

import pytest

from fedssl.artifacts.store import FileStore

DATA = b"weights"
DIGEST = hashlib.sha256(DATA).hexdigest()


def _write(store: FileStore) -> None:
    with store.writer() as writer:
        writer.write(DATA)
        writer.commit()


def _is_mounted(monkeypatch: pytest.MonkeyPatch, root: Path, mounted: bool) -> None:  # noqa: FBT001
    is_mount = Path.is_mount
    monkeypatch.setattr(Path, "is_mount", lambda path: mounted if path == root else is_mount(path))


def test_nothing_is_written_below_a_missing_mount(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder in its place belongs to another disk: files written there would be missing from the store later."""
    _is_mounted(monkeypatch, tmp_path, mounted=True)
    store = FileStore(tmp_path)
    _write(store)
    (tmp_path / "incoming").rename(tmp_path / "elsewhere")
    _is_mounted(monkeypatch, tmp_path, mounted=False)
    with pytest.raises(OSError, match=f"not mounted: '{tmp_path}'"):
        _write(store)
    with pytest.raises(OSError, match="not mounted"):
        store.partial("x").append([b"a"], 0)
    assert [path.name for path in tmp_path.iterdir() if path.name in ("incoming", "partial")] == []
    _is_mounted(monkeypatch, tmp_path, mounted=True)
    _write(store)
    assert DIGEST in store


def test_a_missing_root_is_not_created_again(tmp_path: Path) -> None:
    """The root may be a folder inside a mount that is missing."""
    store = FileStore(tmp_path / "store")
    (tmp_path / "store" / "incoming").rmdir()
    (tmp_path / "store").rmdir()
    with pytest.raises(FileNotFoundError):
        _write(store)
    assert not (tmp_path / "store").exists()


def test_a_read_only_store_can_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new store of the folder tries to delete what a killed process left behind, and cannot."""

    def fail(path: Path, *, missing_ok: bool = False) -> None:
        raise OSError(errno.EROFS, "Read-only file system", str(path))

    _write(FileStore(tmp_path))
    abandoned = tmp_path / "incoming" / "abandoned"
    abandoned.touch()
    os.utime(abandoned, (0, 0))
    monkeypatch.setattr(Path, "unlink", fail)
    assert DIGEST in FileStore(tmp_path)


def test_a_file_stored_again_meanwhile_is_not_set_aside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = FileStore(tmp_path)
    _write(store)
    path = store.path(DIGEST)
    path.write_bytes(b"damaged")
    os.utime(path, (0, 0))
    file_digest = hashlib.file_digest

    def stored_meanwhile(*arguments: object) -> object:
        found = file_digest(*arguments)  # type: ignore[arg-type]
        monkeypatch.setattr(hashlib, "file_digest", file_digest)
        _write(store)
        return found

    monkeypatch.setattr(hashlib, "file_digest", stored_meanwhile)
    assert not store.set_aside(DIGEST)
    assert path.read_bytes() == DATA


def test_a_file_that_is_being_restored_is_not_set_aside(tmp_path: Path) -> None:
    """An operator is copying a large file from a backup, and a reader finds only half of it."""
    store = FileStore(tmp_path)
    _write(store)
    path = store.path(DIGEST)
    with path.open("wb") as restored:
        restored.write(DATA[:3])
        restored.flush()
        assert not store.set_aside(DIGEST)
        restored.write(DATA[3:])
    assert path.read_bytes() == DATA


def test_parent_folders_are_synced_only_when_they_are_new(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[Path] = []
    monkeypatch.setattr("fedssl.artifacts.store.sync", lambda path: synced.append(Path(path)))
    store, folder = FileStore(tmp_path), tmp_path / DIGEST[:2] / DIGEST[2:4]
    _write(store)
    assert synced == [folder, folder.parent, tmp_path]
    _write(store)
    assert synced[3:] == [folder]
    shutil.rmtree(folder.parent)
    _write(store)
    assert synced[4:] == [folder, folder.parent, tmp_path]
