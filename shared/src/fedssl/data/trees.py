"""Trees of image files: a folder, or a zip archive that is read without unpacking it to disk."""

import io
import os
import re
import zipfile
import zlib
from pathlib import Path
from typing import Protocol

from fedssl.data import packed
from fedssl.data.packed import PACKED_SUFFIXES
from fedssl.errors import DataError

SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".tif", ".tiff", ".webp", ".npy")

_MAX_TEXT_BYTES = 64 << 20
_MAX_MEMBER_BYTES = 16 << 20
_MAX_MEMBERS = 1_000_000
_MAX_ARCHIVE_BYTES = 8 << 30
_ZIP_ERRORS = (OSError, EOFError, ValueError, RuntimeError, zipfile.BadZipFile, zlib.error)


_FRAME = re.compile(r"(.+)#(\d{1,6})", re.DOTALL)
MOST_PARTS = 999_999
"""The largest number of frames or slices of a file: more have no names."""

DICOM_SUFFIXES = (".dcm", ".dicom")
"""Suffixes of DICOM. Files without a suffix are DICOM if their content is: archives often store them so."""

NIFTI_SUFFIXES = (".nii", ".nii.gz")


def split_name(name: str) -> tuple[str, int | None]:
    """Return the file that holds an image, and the number of its frame or slice if the file may hold several.

    Files with the suffix of another image format hold one image each.

    >>> split_name("scans/1.dcm#12"), split_name("scans/1.dcm"), split_name("photo#1.png")
    (('scans/1.dcm', 12), ('scans/1.dcm', None), ('photo#1.png', None))
    """
    found = _FRAME.fullmatch(name)
    return (name, None) if found is None else (found[1], int(found[2]))


def is_dicom(name: str) -> bool:
    """Return whether a listed image is DICOM: all listed images without the suffix of another format are."""
    return not is_image(split_name(name)[0]) and not is_nifti(name) and not is_packed(name)


def is_nifti(name: str) -> bool:
    """Return whether a file, or a listed slice of it, is NIfTI."""
    return split_name(name)[0].lower().endswith(NIFTI_SUFFIXES)


def is_packed(name: str) -> bool:
    """Return whether a file holds many images, or a listed image is one of such a file."""
    return split_name(name)[0].lower().endswith(PACKED_SUFFIXES)


def is_loaded_as_a_whole(name: str) -> bool:
    """Return whether loading a listed image loads many others: a NIfTI file, an `.npz` array, or a group of rows."""
    return split_name(name)[0].lower().endswith((*NIFTI_SUFFIXES, ".npz", ".parquet"))


def is_array(name: str) -> bool:
    """Return whether a listed image is an array of NumPy."""
    return split_name(name)[0].lower().endswith((".npy", ".npz"))


class Tree(Protocol):
    """Folders of files, named by their paths below `path` with `/` between the parts; "" is `path` itself."""

    @property
    def path(self) -> Path: ...

    def folders(self, below: str) -> list[str]:
        """Return the last parts of the names of the sub-folders, sorted; an empty list if there is no such folder."""
        ...

    def images(self, below: str) -> list[str]:
        """Return the last parts of the names of the image files, recognised by their suffixes, sorted."""
        ...

    def has(self, name: str) -> bool:
        """Return whether there is a file of this name."""
        ...

    def text(self, name: str) -> str:
        """Return a text file's content. Raises DataError."""
        ...

    def open(self, name: str) -> Path | io.BytesIO:
        """Return a path or stream that PIL can open. Raises DataError, and ValueError for one of many in a file."""
        ...

    def stamp(self, name: str) -> str:
        """Return a text that changes when the file's content changes. Raises DataError."""
        ...


class FolderTree:
    """Files on disk. Links to folders are followed, because a subset of ImageNet often consists of links."""

    def __init__(self, path: Path) -> None:
        self._path = path

    @property
    def path(self) -> Path:
        return self._path

    def folders(self, below: str) -> list[str]:
        return sorted(entry.name for entry in self._entries(below) if entry.is_dir() and not entry.name.startswith("."))

    def images(self, below: str) -> list[str]:
        return sorted(entry.name for entry in self._entries(below) if is_image(entry.name) and entry.is_file())

    def has(self, name: str) -> bool:
        return (self._path / name).is_file()

    def text(self, name: str) -> str:
        path = self._path / name
        try:
            with path.open("rb") as file:
                return _decoded(file.read(_MAX_TEXT_BYTES + 1), str(path))
        except OSError as error:
            raise DataError(f"cannot read {path}: {error.strerror}") from error

    def open(self, name: str) -> Path | io.BytesIO:
        file, number = split_name(name)
        path = self._path / file
        return packed.open_image(path, number) if is_packed(name) else path

    def stamp(self, name: str) -> str:
        path = self._path / split_name(name)[0]
        try:
            status = path.stat()
        except OSError as error:
            raise DataError(f"cannot read {path}: {error.strerror}") from error
        return f"{status.st_size} {status.st_mtime_ns} {status.st_ctime_ns}"  # copying programs set the first two

    def _entries(self, below: str) -> list[os.DirEntry[str]]:
        folder = self._path / below
        try:
            with os.scandir(folder) as entries:
                return list(entries)
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            raise DataError(
                f"cannot list {folder}: {error.strerror}; give the user of this process permission to read it"
            ) from error


class ZipTree:
    """Files in a zip archive. The sizes that it announces are bounded, and checked when its files are read.

    Raises DataError if the file is not an archive, names files outside of it, or announces absurd sizes.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._archive = zipfile.ZipFile(path)
        except _ZIP_ERRORS as error:
            raise DataError(f"cannot read {path}: {error}; fetch the file again") from error
        self._members: dict[str, zipfile.ZipInfo] = {}
        self._folders: dict[str, set[str]] = {}
        self._files: dict[str, list[str]] = {}
        members = self._archive.infolist()
        if len(members) > _MAX_MEMBERS or sum(member.file_size for member in members) > _MAX_ARCHIVE_BYTES:
            raise DataError(f"{path} would unpack to more than a data set can be: it is damaged, or not what it seems")
        for member in members:
            self._add(member)

    @property
    def path(self) -> Path:
        return self._path

    def folders(self, below: str) -> list[str]:
        return sorted(name for name in self._folders.get(below, ()) if not name.startswith("."))

    def images(self, below: str) -> list[str]:
        return sorted(name for name in self._files.get(below, ()) if is_image(name))

    def has(self, name: str) -> bool:
        return name in self._members

    def text(self, name: str) -> str:
        return _decoded(self._read(name), f"{name} in {self._path}")

    def open(self, name: str) -> io.BytesIO:
        return io.BytesIO(self._read(name))

    def stamp(self, name: str) -> str:
        member = self._member(name)
        return f"{member.file_size} {member.CRC:08x}"

    def _add(self, member: zipfile.ZipInfo) -> None:
        name = member.filename
        parts = name.split("/")
        if name.startswith("/") or ".." in parts or "\\" in name:
            raise DataError(f"{self._path} names a file outside of it, {name!r}: do not trust this archive")
        if name.endswith("/"):
            return
        if name in self._members:
            raise DataError(f"{self._path} holds {name} twice: it is damaged, or not what it seems")
        self._members[name] = member
        below = name[: -len(parts[-1]) - 1]
        if below not in self._files:
            self._files[below] = []
            for depth in range(1, len(parts)):
                self._folders.setdefault("/".join(parts[: depth - 1]), set()).add(parts[depth - 1])
        self._files[below].append(parts[-1])

    def _member(self, name: str) -> zipfile.ZipInfo:
        if name not in self._members:
            raise DataError(f"{self._path} has no {name}; fetch the file again")
        return self._members[name]

    def _read(self, name: str) -> bytes:
        member = self._member(name)
        if member.file_size > _MAX_MEMBER_BYTES:
            raise DataError(f"{name} in {self._path} would unpack to {member.file_size:,} bytes: do not trust it")
        try:
            with self._archive.open(member) as file:
                return file.read(_MAX_MEMBER_BYTES + 1)  # stops at the announced size and verifies the checksum
        except _ZIP_ERRORS as error:
            raise DataError(f"cannot read {name} in {self._path}: {error}; fetch the file again") from error


def is_image(name: str) -> bool:
    """Return whether a file's name has the suffix of an image."""
    return name.lower().endswith(SUFFIXES)


def _decoded(content: bytes, name: str) -> str:
    if len(content) > _MAX_TEXT_BYTES:
        raise DataError(f"{name} is too long for a list of names: it is damaged, or not what it seems")
    return content.decode("utf-8", errors="replace")
