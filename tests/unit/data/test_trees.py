"""Folders and zip archives of images. Zip archives are not trusted."""

import zipfile
from pathlib import Path

import pytest

from fedssl.data.trees import FolderTree, ZipTree
from fedssl.errors import DataError


def _zip(path: Path, files: dict[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return path


def test_folders_and_zip_archives_give_the_same_tree(tmp_path: Path) -> None:
    files = {
        "a/1.jpg": b"1",
        "a/10.JPEG": b"2",
        "a/2.png": b"3",
        "a/note.txt": b"4",
        "b/c/x.bmp": b"5",
        "top.txt": b"6",
    }
    for name, content in files.items():
        (tmp_path / "folder" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "folder" / name).write_bytes(content)
    for tree in (FolderTree(tmp_path / "folder"), ZipTree(_zip(tmp_path / "set.zip", files))):
        assert tree.folders("") == ["a", "b"]
        assert tree.folders("b") == ["c"]
        assert tree.folders("none") == tree.images("none") == tree.images("b") == []
        assert tree.images("a") == ["1.jpg", "10.JPEG", "2.png"]
        assert tree.images("b/c") == ["x.bmp"]
        assert tree.has("a/note.txt")
        assert not tree.has("a")
        assert tree.text("top.txt") == "6"
        assert tree.stamp("a/1.jpg") != tree.stamp("b/c/x.bmp")
        with pytest.raises(DataError, match="none"):
            tree.text("none")
        with pytest.raises(DataError, match="none"):
            tree.stamp("none")


@pytest.mark.parametrize("name", ["../evil.jpg", "a/../../evil.jpg", "/etc/evil.jpg", "a\\..\\evil.jpg"])
def test_names_that_lead_outside_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(DataError, match="outside"):
        ZipTree(_zip(tmp_path / "set.zip", {"a/1.jpg": b"", name: b""}))


def test_duplicate_names_are_refused(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "set.zip", "w") as archive:
        archive.writestr("a.jpg", b"1")
        with pytest.warns(UserWarning, match="Duplicate"):
            archive.writestr("a.jpg", b"2")
    with pytest.raises(DataError, match="twice"):
        ZipTree(tmp_path / "set.zip")


def test_decompression_bombs_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = _zip(tmp_path / "set.zip", {"a/1.jpg": bytes(1 << 20), "a/2.jpg": b"small"})
    monkeypatch.setattr("fedssl.data.trees._MAX_MEMBER_BYTES", 1 << 16)
    tree = ZipTree(path)
    tree.open("a/2.jpg")
    with pytest.raises(DataError, match=r"a/1\.jpg .*1,048,576 bytes"):
        tree.open("a/1.jpg")
    monkeypatch.setattr("fedssl.data.trees._MAX_ARCHIVE_BYTES", 1 << 16)
    with pytest.raises(DataError, match="more than a data set can be"):
        ZipTree(path)
    monkeypatch.setattr("fedssl.data.trees._MAX_MEMBERS", 1)
    with pytest.raises(DataError, match="more than a data set can be"):
        ZipTree(_zip(tmp_path / "many.zip", {"a": b"", "b": b""}))


def test_a_member_with_a_false_size_is_refused(tmp_path: Path) -> None:
    """The directory declares fewer bytes than there are. Only these are read, and the checksum does not match."""
    path = _zip(tmp_path / "set.zip", {"a.jpg": bytes(range(256)) * 64})
    content = bytearray(path.read_bytes())
    directory = content.index(b"PK\x01\x02")
    content[directory + 24 : directory + 28] = (100).to_bytes(4, "little")
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"a\.jpg"):
        ZipTree(path).open("a.jpg")


@pytest.mark.parametrize("content", [b"", b"nonsense", b"PK\x03\x04 cut"])
def test_a_file_that_is_not_a_zip_archive_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "set.zip").write_bytes(content)
    with pytest.raises(DataError, match=r"set\.zip"):
        ZipTree(tmp_path / "set.zip")


def test_a_damaged_member_is_named(tmp_path: Path) -> None:
    path = _zip(tmp_path / "set.zip", {"a.jpg": bytes(range(256)) * 64})
    content = bytearray(path.read_bytes())
    content[45:60] = bytes(15)
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"a\.jpg"):
        ZipTree(path).open("a.jpg")


def test_encrypted_members_are_not_read(tmp_path: Path) -> None:
    path = _zip(tmp_path / "set.zip", {"a.jpg": b"x"})
    content = bytearray(path.read_bytes())
    content[6] |= 1
    content[content.index(b"PK\x01\x02") + 8] |= 1
    path.write_bytes(content)
    with pytest.raises(DataError, match="encrypted"):
        ZipTree(path).open("a.jpg")


def test_a_list_that_is_too_long_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "words.txt").write_text("x" * 100)
    monkeypatch.setattr("fedssl.data.trees._MAX_TEXT_BYTES", 99)
    with pytest.raises(DataError, match="too long"):
        FolderTree(tmp_path).text("words.txt")
