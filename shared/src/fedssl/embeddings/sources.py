"""The images that `fedssl embed` reads: image files, decoded a batch at a time, or the arrays of a data set."""

import hashlib
import os
from collections.abc import Generator
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any, Protocol

import numpy as np
import PIL
from PIL import Image

from fedssl.data import KNOWN, ImageData, Split, conform
from fedssl.data.contents import readable
from fedssl.data.datasets import find_path, list_files, load_arrays
from fedssl.data.decode_file import decoder_of, draw, thumbnail
from fedssl.data.decoding import decode_batches
from fedssl.data.folders import list_all
from fedssl.data.formats import StoredArrays
from fedssl.data.image_files import ImageFiles
from fedssl.data.rasters import Raster
from fedssl.data.reading import Reading
from fedssl.data.trees import FolderTree
from fedssl.data.windowing import range_of
from fedssl.errors import DataError
from fedssl.protocol.data import DataConfig

_CHUNK = 2048


@dataclass(frozen=True, slots=True)
class Batch:
    """Some consecutive images of a source.

    Attributes:
        images: those that can be decoded, in the shape of a run's images.
        damaged: the positions of the others in the source, and why they cannot be decoded.
        num_deep: how many images are stored with 16 bits per value.
        highest: the highest value of those with 16 bits.
    """

    images: ImageData
    damaged: list[tuple[int, str]]
    num_deep: int = 0
    highest: int = 0


class Source(Protocol):
    """Images in a fixed order, each with a name."""

    @property
    def title(self) -> str:
        """Where the images are: an absolute path, or the name of a known data set."""
        ...

    @property
    def split(self) -> Split | None:
        """The split of the data set; None if a folder is read as a whole."""
        ...

    def __len__(self) -> int: ...

    def left_out(self) -> str:
        """Return what lies between the images and is not read, in one line, or an empty text."""
        ...

    def names(self, start: int, stop: int) -> list[str]:
        """Return the names of the images from position `start` to before `stop`."""
        ...

    def digest(self) -> str:
        """Return a sha256 that changes if images are added, removed, renamed or rewritten."""
        ...

    def decoders(self) -> list[str]:
        """Return the packages that decode the images, with their versions; none if the images are arrays."""
        ...

    def batches(self, data: DataConfig, batch_size: int, start: int) -> Generator[Batch]:
        """Yield the images from position `start` on, in batches of `batch_size`."""
        ...

    def thumbnail(self, name: str, side: int) -> Image.Image:
        """Return a small version of an image in RGB. Raises DataError."""
        ...


def open_source(name_or_path: str, split: Split | None, root: Path | None) -> Source:
    """Return the images of a folder at any depth, of an `.npz` file, or of a known data set.

    Args:
        name_or_path: resolved as in :func:`fedssl.data.load_dataset`.
        split: the split of an `.npz` file or a known data set; None means "train". A folder is read as a whole.
        root: a folder of data sets, which is searched first.

    Raises DataError: there are no images, or `split` is given for a folder.
    """
    if name_or_path in KNOWN:
        files, title = list_files(name_or_path, split or "train", root), name_or_path
        if files is not None:
            return FileSource(files, title, split or "train")
    else:
        path = find_path(name_or_path, root).absolute()
        if path.is_dir():
            if split is not None:
                raise DataError(f"{path} is a folder, which is read as a whole: give the folder {path / split} instead")
            return FileSource(list_all(path), str(path), None)
        title = str(path)
    return ArraySource(load_arrays(title, split or "train", root), title, split or "train")


def folder_source(folder: Path) -> "FileSource":
    """Return a folder whose images are known by name: it is not searched."""
    return FileSource(ImageFiles(str(folder), FolderTree(folder), ()), str(folder), None)


def reopen_source(name_or_path: str, split: Split | None, root: Path | None) -> Source:
    """Return a source whose images are known by name: a folder is not searched. Raises DataError."""
    if name_or_path not in KNOWN and (path := find_path(name_or_path, root)).is_dir():
        return folder_source(path)
    return open_source(name_or_path, split, root)


@dataclass(frozen=True)
class FileSource:
    """Image files. A name is the path below the folder, in which bytes that are not UTF-8 are replaced."""

    files: ImageFiles
    title: str
    split: Split | None

    def __len__(self) -> int:
        return len(self.files)

    def left_out(self) -> str:
        return "" if self.files.contents is None else self.files.contents.describe()

    def names(self, start: int, stop: int) -> list[str]:
        return [readable(name) for name in self.files.names[start:stop]]

    def digest(self) -> str:
        digest = hashlib.sha256()
        for name in self.files.names:
            digest.update(b"%s\0%s\0" % (os.fsencode(name), self.files.tree.stamp(name).encode()))
        return digest.hexdigest()

    def decoders(self) -> list[str]:
        return sorted({f"PIL {PIL.__version__}{decoder_of(name)}" for name in self.files.names})

    def batches(self, data: DataConfig, batch_size: int, start: int) -> Generator[Batch]:
        files = replace(self.files, reading=Reading.of(data))
        with closing(decode_batches(files, data.channels, data.image_size, batch_size, start)) as batches:
            for parts in batches:
                names = self.files.names[start : start + sum(len(part.images) for part in parts)]
                reasons = {name: why for part in parts for name, why in part.damaged}
                kept = np.concatenate([part.images for part in parts])[[name not in reasons for name in names]]
                yield Batch(
                    ImageData(kept),
                    [(at, reasons[name]) for at, name in enumerate(names, start) if name in reasons],
                    sum(part.num_deep for part in parts),
                    max(part.highest for part in parts),
                )
                start += len(names)

    def thumbnail(self, name: str, side: int) -> Image.Image:
        parts = PurePosixPath(name).parts
        if name.startswith("/") or ".." in parts:  # someone else may have made the index
            raise DataError(f"{name} lies outside of {self.title}")
        return thumbnail(self.files, name, side)


@dataclass(frozen=True)
class ArraySource:
    """The arrays of a data set. A name is the position of an image, from 0."""

    arrays: StoredArrays
    title: str
    split: Split | None

    def __len__(self) -> int:
        return len(self.arrays.pixels)

    def left_out(self) -> str:
        return ""

    def names(self, start: int, stop: int) -> list[str]:
        return [str(position) for position in range(start, min(stop, len(self)))]

    def digest(self) -> str:
        digest = hashlib.sha256(f"{self.arrays.pixels.shape}".encode())
        for start in range(0, len(self), _CHUNK):
            digest.update(self.arrays.pixels[start : start + _CHUNK].tobytes())
        return digest.hexdigest()

    def decoders(self) -> list[str]:
        return []

    def batches(self, data: DataConfig, batch_size: int, start: int) -> Generator[Batch]:
        for first in range(start, len(self), batch_size):
            pixels = self.arrays.through(data.window, slice(first, first + batch_size))
            yield Batch(conform(ImageData(pixels), data), [])

    def thumbnail(self, name: str, side: int) -> Image.Image:
        if not name.isascii() or not name.isdigit() or len(name) > len(str(len(self))) or int(name) >= len(self):
            raise DataError(f"{self.title} has {len(self):,} images, and no image {name}")
        pixels_CHW = self.arrays.pixels[int(name)]
        try:
            return draw(Raster(pixels_CHW.transpose(1, 2, 0), range_of(pixels_CHW.dtype)), None, side)
        except ValueError as error:
            raise DataError(f"image {name} of {self.title} cannot be drawn: {error}") from error


def describe(source: Source) -> dict[str, Any]:
    """Return what identifies the images of a source, for a file's metadata."""
    return {"from": source.title, "split": source.split, "num": len(source), "sha256": source.digest()}
