"""The contents of a folder: the images in the order in which they are used, and what is left out, with the reason.

Images may lie at any depth. Names are paths below the folder, with `/` between their parts.
"""

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from fedssl.data import dicom, format_packages, nifti, packed
from fedssl.data.trees import DICOM_SUFFIXES, is_image, is_nifti, is_packed, split_name
from fedssl.errors import DataError

_NUM_NAMED = 3
_PLURALS = re.compile(r"\b(file|folder|link)s\b")
_DICOM_MAGIC, _DICOM_OFFSET = b"DICM", 128
_PERHAPS_DICOM = ("", ".ima", ".dic")

_CONVERT = "this format is not read: convert them to PNG, JPEG or TIFF"
_MEDICAL = "this format is not read: convert them to PNG of 8 bits, with the window that you choose"
_PACKED = "not unpacked: unpack it, or use an uncompressed .tar file"
_FORMATS_NOT_READ = {
    **dict.fromkeys((".mha", ".mhd", ".nrrd"), _MEDICAL),
    **dict.fromkeys(
        (".gif", ".heic", ".heif", ".avif", ".jp2", ".j2k", ".jxl", ".jfif", ".ppm", ".pgm", ".pbm", ".tga", ".psd",
         ".svg", ".raw", ".dng", ".cr2", ".nef", ".arw", ".exr", ".hdr", ".svs", ".ndpi", ".czi", ".mrxs", ".vsi",
         ".scn"),
        _CONVERT,
    ),
    **dict.fromkeys((".zip", ".tgz", ".tar.gz", ".7z", ".rar", ".h5", ".hdf5", ".tfrecord"), _PACKED),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class LeftOut:
    """Some entries of a folder that are not used, for one reason.

    Attributes:
        what: the entries, for example ".dcm" or "hidden files".
        reason: why they are not used.
        num: how many there are.
        names: the first few.
        may_be_images: whether the owner may have expected them to be used.
    """

    what: str
    reason: str
    num: int
    names: tuple[str, ...]
    may_be_images: bool

    def __str__(self) -> str:
        more = ", ..." if self.num > len(self.names) else ""
        named = f"; {', '.join(self.names)}{more}" if self.may_be_images else ""
        what = _PLURALS.sub(r"\1", self.what) if self.num == 1 else self.what
        return f"{self.num:,} {what} ({self.reason}{named})"


@dataclass(frozen=True, slots=True)
class Contents:
    """The images of a folder.

    Attributes:
        loose: the images in the folder itself.
        by_class: the images of each sub-folder, at any depth, by the name of the sub-folder.
        left_out: what is not used.
        links_out: links that lead out of the folder, and were followed.
        groups: the number of the patient of each DICOM image, or of the file of a frame or slice without a patient.
    """

    loose: tuple[str, ...]
    by_class: dict[str, tuple[str, ...]]
    left_out: tuple[LeftOut, ...] = ()
    links_out: tuple[str, ...] = ()
    groups: dict[str, int] = field(default_factory=dict)

    @property
    def is_complete(self) -> bool:
        """Return whether everything that may be an image is used."""
        return not any(part.may_be_images for part in self.left_out)

    def describe(self) -> str:
        """Return what is left out, in one line, or an empty text."""
        parts = [f"left out: {', '.join(map(str, self.left_out))}"] if self.left_out else []
        if self.links_out:
            links = "1 link that leads" if len(self.links_out) == 1 else f"{len(self.links_out):,} links that lead"
            parts.append(f"{links} out of the folder, followed")
        return "; ".join(parts)


def read_contents(folder: Path) -> Contents:
    """List a folder: the classes in the order of their names, and in each folder its images before its sub-folders.

    Links are followed, except to a folder that is also read at another place, so that loops end. Raises DataError if a
    folder cannot be listed.
    """
    reader = _Reader(folder)
    images, folders = reader.entries("")
    by_class = {name: tuple(reader.below(name)) for name in folders}
    packed.release()
    return Contents(tuple(images), by_class, reader.left_out(), tuple(reader.links_out), reader.groups)


def list_classes(folder: Path) -> tuple[str, ...]:
    """Return the names of the classes of :func:`read_contents`, without listing their images. Raises DataError."""
    return tuple(_Reader(folder).entries("")[1])


def readable(name: str) -> str:
    """Return a file's name as text. Bytes that are not UTF-8, and could not be displayed or sent, are replaced."""
    return os.fsencode(name).decode("utf-8", errors="replace")


@dataclass(slots=True)
class _Reader:
    root: Path
    links_out: list[str] = field(default_factory=list)
    groups: dict[str, int] = field(default_factory=dict)
    _numbers: dict[bytes | str, int] = field(default_factory=dict)
    _left: dict[tuple[str, str, bool], list[str]] = field(default_factory=dict)
    _nums: dict[tuple[str, str, bool], int] = field(default_factory=dict)
    _read: set[tuple[int, int]] = field(default_factory=set)

    def left_out(self) -> tuple[LeftOut, ...]:
        keys = sorted(self._left, key=lambda key: (not key[2], -self._nums[key], key[0]))
        return tuple(LeftOut(what, why, self._nums[what, why, may], tuple(self._left[what, why, may]), may)
                     for what, why, may in keys)  # fmt: skip

    def below(self, folder: str) -> Iterable[str]:
        """Yield the images in a folder, and then those of its sub-folders."""
        pending = [folder]
        while pending:
            here = pending.pop()
            images, folders = self.entries(here)
            yield from images
            pending += reversed(folders)

    def entries(self, below: str) -> tuple[list[str], list[str]]:
        """Return the images in a folder and its sub-folders, both in the order of their names."""
        images: list[str] = []
        folders: list[str] = []
        found = self._listed(below)
        if not found and below:
            self._leave("empty folders", "no images", below, may_be_images=False)
        for entry in found:
            name = f"{below}/{entry.name}" if below else entry.name
            if entry.name.startswith("."):
                self._leave("hidden files or folders", "their names begin with a dot", name, may_be_images=False)
            elif _is_folder(entry):
                if not self._is_repeated(entry, name):
                    folders.append(name)
            elif not _is_file(entry):
                self._leave("broken links or special files", "there are no bytes to read", name, may_be_images=True)
            elif is_image(entry.name):
                self._note_link(entry, name)
                images.append(name)
            elif is_nifti(name):
                self._note_link(entry, name)
                images += self._slices(entry, name)
            elif is_packed(entry.name):
                self._note_link(entry, name)
                images += self._members(entry, name)
            elif _is_dicom(entry):
                self._note_link(entry, name)
                images += self._frames(entry, name)
            else:
                self._leave_file(entry, name)
        return images, folders

    def _frames(self, entry: os.DirEntry[str], name: str) -> list[str]:
        """Return the names of a DICOM file's images: its own, or one per frame if it has several."""
        what = _suffix(name) or "DICOM files without a suffix"
        if (why := format_packages.why_unread("DICOM")) is not None:
            self._leave(what, why, name, may_be_images=True)
            return []
        if split_name(name)[1] is not None:
            self._leave(what, "a name that ends in # and a number means a frame: rename them", name, may_be_images=True)
            return []
        try:
            header = dicom.read_header(Path(entry.path))
        except ValueError:
            return [name]  # decoding reports why it cannot be read
        if not header.num_frames:
            self._leave(what, "DICOM without pixels, such as a report or an index", name, may_be_images=False)
            return []
        return self._parts(name, header.num_frames, header.patient or name)

    def _slices(self, entry: os.DirEntry[str], name: str) -> list[str]:
        """Return the names of the slices of a NIfTI file."""
        if (why := format_packages.why_unread("NIfTI")) is not None:
            self._leave(_suffix(name), why, name, may_be_images=True)
            return []
        try:
            num_slices, _ = nifti.read_header(Path(entry.path))
        except ValueError:
            return [name]  # decoding reports why it cannot be read
        return self._parts(name, num_slices, name)

    def _members(self, entry: os.DirEntry[str], name: str) -> list[str]:
        """Return the names of the images in a file that holds many.

        Raises DataError if it cannot be read, because the number of images that this would leave out is unknown.
        """
        if _suffix(name) == ".parquet" and (why := format_packages.why_unread("Parquet")) is not None:
            self._leave(_suffix(name), why, name, may_be_images=True)
            return []
        try:
            num_images = packed.count_images(Path(entry.path))
        except ValueError as error:
            raise DataError(
                f"cannot read {readable(entry.path)}: {error}; repair the file, or move it out of the folder"
            ) from error
        if not num_images:
            self._leave(_suffix(name), "no images in it", name, may_be_images=True)
        return [f"{name}#{number}" for number in range(1, num_images + 1)]

    def _parts(self, name: str, num: int, group: bytes | str) -> list[str]:
        """Return the names of a file's images: its own, or one per part if it has several. They form a group."""
        names = [f"{name}#{number}" for number in range(1, num + 1)] if num > 1 else [name]
        self.groups.update(dict.fromkeys(names, self._numbers.setdefault(group, len(self._numbers))))
        return names

    def _listed(self, below: str) -> list[os.DirEntry[str]]:
        path = self.root / below
        try:
            status = path.stat()
            self._read.add((status.st_dev, status.st_ino))
            with os.scandir(path) as entries:
                return sorted(entries, key=lambda entry: entry.name)
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            raise DataError(
                f"cannot list {readable(str(path))}: {error.strerror}; give the user of this process permission to "
                "read it"
            ) from error

    def _is_repeated(self, entry: os.DirEntry[str], name: str) -> bool:
        if not entry.is_symlink():
            return False
        status = entry.stat()
        if (status.st_dev, status.st_ino) in self._read or self._is_listed_itself(entry):
            self._leave("links", "to folders that are read already", name, may_be_images=False)
            return True
        self._note_link(entry, name)
        return False

    def _is_listed_itself(self, entry: os.DirEntry[str]) -> bool:
        """Return whether a link leads to a folder that is read at its own place, earlier or later than the link."""
        target, root = (Path(os.path.realpath(path)) for path in (entry.path, self.root))
        return target.is_relative_to(root) and not any(part.startswith(".") for part in target.relative_to(root).parts)

    def _note_link(self, entry: os.DirEntry[str], name: str) -> None:
        if entry.is_symlink() and not Path(os.path.realpath(entry.path)).is_relative_to(os.path.realpath(self.root)):
            self.links_out.append(readable(name))

    def _leave_file(self, entry: os.DirEntry[str], name: str) -> None:
        suffix = _suffix(entry.name)
        if (reason := _FORMATS_NOT_READ.get(suffix)) is not None:
            self._leave(suffix, reason, name, may_be_images=True)
        else:
            self._leave(suffix or "files without a suffix", "not images", name, may_be_images=False)

    def _leave(self, what: str, reason: str, name: str, *, may_be_images: bool) -> None:
        key = (what, reason, may_be_images)
        self._nums[key] = self._nums.get(key, 0) + 1
        names = self._left.setdefault(key, [])
        if len(names) < _NUM_NAMED:
            names.append(readable(name))


def _suffix(name: str) -> str:
    """Return a name's suffix in lower case, both parts of one such as `.nii.gz`; "" if it has none, or only digits.

    >>> [_suffix(name) for name in ("a.DCM", "b.nii.gz", "1.2.840.113", "LICENSE")]
    ['.dcm', '.nii.gz', '', '']
    """
    parts = readable(name).lower().split(".")
    if len(parts) > 2 and f".{parts[-2]}.{parts[-1]}" in (*_FORMATS_NOT_READ, ".nii.gz"):
        return f".{parts[-2]}.{parts[-1]}"
    return f".{parts[-1]}" if len(parts) > 1 and not parts[-1].isdigit() else ""


def _is_dicom(entry: os.DirEntry[str]) -> bool:
    """Return whether a file is DICOM, by its suffix or, as archives often store it without one, by its content."""
    if (suffix := _suffix(entry.name)) not in _PERHAPS_DICOM:
        return suffix in DICOM_SUFFIXES
    try:
        with Path(entry.path).open("rb") as file:
            return file.read(_DICOM_OFFSET + len(_DICOM_MAGIC))[_DICOM_OFFSET:] == _DICOM_MAGIC
    except OSError:
        return False


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a loop of links
        return False


def _is_file(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_file()
    except OSError:
        return False
