"""Load data sets by name or path."""

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedssl.cache import cache_folder
from fedssl.data.catalogue import KNOWN, KnownDataset, Split
from fedssl.data.contents import readable
from fedssl.data.decode_file import shape_of_first
from fedssl.data.decoded import decoded
from fedssl.data.decoding import log
from fedssl.data.folders import list_all, list_folder, read_folder, report_left_out, split_folder
from fedssl.data.formats import StoredArrays, read_npz, read_stored, shared_group
from fedssl.data.image_files import ImageFiles
from fedssl.data.image_groups import first_divided
from fedssl.data.images import ImageData, conform, through_window
from fedssl.data.reading import AS_STORED, Reading
from fedssl.errors import DataError
from fedssl.protocol.data import DataConfig

DATASETS = tuple(KNOWN)
"""The names that :func:`load_dataset` knows; any other argument is a path."""

DATA_VARIABLE = "FEDSSL_DATA"
"""The environment variable that names a folder of data sets."""

_SYSTEM_FOLDER = Path("/usr/share/datasets")  # where Debian's packages install data sets


def load_dataset(
    name_or_path: str,
    split: Split,
    root: Path | None = None,
    *,
    image_size: int | None = None,
    channels: int | None = None,
    reading: Reading = AS_STORED,
) -> ImageData:
    """Read one split of a data set.

    Args:
        name_or_path: one of :data:`DATASETS`, an image folder, or an `.npz` file. A relative path is resolved in the
            working directory, then in `root`, the folder that `FEDSSL_DATA` names, and the folder of fetched sets.
        split: "train" or "test".
        root: a folder of data sets, which is searched first, before `FEDSSL_DATA`, the folder of fetched sets and
            `/usr/share/datasets`. A set may be in the folder itself or in a sub-folder with its name.
        image_size: for images stored as files: the size to decode to; None means the set's own, or that of a folder's
            first image. Arrays keep their own size; :func:`fedssl.data.conform` changes it.
        channels: for images stored as files: 1 to 16; None means the set's own, or that of a folder's first image.
        reading: how values become pixels.

    The images of a known set that are stored as files (ImageNet's subsets) are decoded once and then memory-mapped.

    Raises:
        DataError: the data cannot be found or read; the message explains what to do.
    """
    _require_split(split)
    if (known := KNOWN.get(name_or_path)) is not None:
        data = _load_known(known, split, root, image_size, channels, reading)
        _compare(known, split, len(data))
        return data
    path = find_path(name_or_path, root)
    if path.is_dir():
        return read_folder(path, split, image_size, channels, reading)
    return read_npz(path, split, reading.window)


def load_conformed(
    name_or_path: str, split: Split, data: DataConfig, root: Path | None = None, *, leave_out: bool = False
) -> ImageData:
    """Read one split of a data set with the size and channels of a run. Image files are decoded to that size.

    With `leave_out`, unreadable files of a folder are left out up to `data.max_unreadable`; otherwise each is an error.
    """
    reading = Reading.of(data) if leave_out else replace(Reading.of(data), max_unreadable=0)
    images = load_dataset(
        name_or_path, split, root, image_size=data.image_size, channels=data.channels, reading=reading
    )
    return conform(images, data)


def load_arrays(name_or_path: str, split: Split, root: Path | None = None) -> StoredArrays:
    """Return a known set or an `.npz` file as it is stored, before any window. Raises DataError."""
    if name_or_path not in KNOWN:
        return read_stored(find_path(name_or_path, root), split)
    images = load_dataset(name_or_path, split, root)
    return StoredArrays(Path(name_or_path), images.images, images.labels, images.class_names, groups=images.groups)


def file_shape(
    name_or_path: str,
    split: Split,
    root: Path | None = None,
    channels: int | None = None,
    reading: Reading = AS_STORED,
) -> tuple[int, int] | None:
    """Return the default (channels, shorter side in pixels) to which :func:`load_dataset` decodes image files.

    `channels` is the requested number, if any. Opens only the first readable image. Returns None if the
    images are arrays. Raises DataError.
    """
    _require_split(split)
    if (known := KNOWN.get(name_or_path)) is not None:
        return None if known.listing is None else (channels or known.channels, known.image_size)
    path = find_path(name_or_path, root)
    return shape_of_first(replace(list_folder(path, split), reading=reading), None, channels) if path.is_dir() else None


def load_labels(
    name_or_path: str, split: Split, root: Path | None = None
) -> tuple[NDArray[np.int64] | None, tuple[str, ...]]:
    """Return labels (N,) and class names of the images of :func:`load_dataset`, without decoding image files."""
    found = list_images(name_or_path, split, root)
    return found.labels, found.class_names


def list_images(name_or_path: str, split: Split, root: Path | None = None) -> ImageFiles | StoredArrays:
    """Return the images of :func:`load_dataset` before any window, with labels and groups. Files are not decoded.

    What a folder holds besides images is logged. Raises DataError.
    """
    if (files := list_files(name_or_path, split, root)) is not None:
        report_left_out(files)
        return files
    return load_arrays(name_or_path, split, root)


def list_files(name_or_path: str, split: Split, root: Path | None = None) -> ImageFiles | None:
    """Return the images of :func:`load_dataset` if they are stored as files, not decoded; None if they are arrays.

    Raises DataError.
    """
    _require_split(split)
    if (known := KNOWN.get(name_or_path)) is not None:
        return None if known.listing is None else known.listing(_require(known, split, root), split)
    path = find_path(name_or_path, root)
    return list_folder(path, split) if path.is_dir() else None


def require_whole_groups(name_or_path: str, root: Path | None = None) -> None:
    """Raise DataError if training and test images of a data set share a group, such as a patient. Decodes nothing."""
    if name_or_path in KNOWN:
        return
    path = find_path(name_or_path, root)
    if not path.is_dir():
        shared = shared_group(path)
    elif (files := list_all(path)).groups is None:
        return
    else:
        folders = [split_folder(path, split).name for split in ("train", "test")]
        splits = {folder: np.flatnonzero([name.startswith(f"{folder}/") for name in files.names]) for folder in folders}
        found = first_divided(splits, files.groups)
        shared = None if found is None else " and ".join(readable(files.names[image]) for _, image in found)
    if shared is not None:
        raise DataError(
            f"the training and the test images of {name_or_path} share a group, such as a patient ({shared}), so an "
            "evaluation would be too good: move all images of a group into one split"
        )


def may_have_labels(name_or_path: str, split: Split, root: Path | None) -> bool:
    """Return False if the data set is a folder of images without labels. Decodes nothing. Raises DataError."""
    if name_or_path in KNOWN:
        return True
    path = find_path(name_or_path, root)
    return not path.is_dir() or list_folder(path, split).labels is not None


def count_images(name_or_path: str, split: Split, root: Path | None = None) -> int:
    """Return the number of images of :func:`load_dataset`, without decoding those in a folder. Raises DataError."""
    path = None if name_or_path in KNOWN else find_path(name_or_path, root)
    if path is not None and path.is_dir():
        return len(list_folder(path, split))
    return len(load_arrays(name_or_path, split, root).pixels)


def find_dataset(name: str, split: Split = "train", root: Path | None = None) -> Path | None:
    """Return the path of a known set on this machine, searched for as in :func:`load_dataset`, or None.

    Returns None also for a set that needs no files.
    """
    known = KNOWN[name]
    if known.find is None:
        return None
    found = (known.find(folder, split) for folder in _places(root, *known.folders))
    return next((path for path in found if path is not None), None)


def find_fashion_mnist(root: Path | None = None) -> Path | None:
    """Return the folder with all four idx files of Fashion-MNIST, searched for as in :func:`load_dataset`, or None."""
    return find_dataset("fashion-mnist", "train", root)


def how_to_get(known: KnownDataset) -> str:
    """Return instructions on how to make a set available."""
    fetch = f"run `fedssl data fetch {known.name}`, or " if known.fetchable else ""
    return f"{fetch}get {known.files} from {known.source}, put it into a folder and set {DATA_VARIABLE} to the folder"


def _load_known(
    known: KnownDataset, split: Split, root: Path | None, image_size: int | None, channels: int | None, reading: Reading
) -> ImageData:
    path = Path() if known.find is None else _require(known, split, root)
    if known.listing is None:
        assert known.read is not None, "a known set has `listing` or `read`"
        return through_window(known.read(path, split), reading.window)
    files = replace(known.listing(path, split), reading=reading)
    pixels = decoded(files, channels or known.channels, image_size or known.image_size)
    return ImageData(pixels, files.labels, files.class_names)


def _require(known: KnownDataset, split: Split, root: Path | None) -> Path:
    path = find_dataset(known.name, split, root)
    if path is None:
        raise DataError(f"found no {known.title} ({split} images): {how_to_get(known)}")
    return path


def _compare(known: KnownDataset, split: Split, num_images: int) -> None:
    published = known.num_train if split == "train" else known.num_test
    if num_images != published:
        log.warning(
            "%s: there are %s %s images, but %s were published", known.title, f"{num_images:,}", split, f"{published:,}"
        )


def _require_split(split: str) -> None:
    if split not in ("train", "test"):
        raise DataError(f"there is no split {split!r}: take train or test")


def _places(root: Path | None, *names: str) -> Iterator[Path]:
    """Yield the places where a data set may be, in the order of the search."""
    variable = os.environ.get(DATA_VARIABLE)
    for folder in (root, Path(variable).expanduser() if variable else None, cache_folder()):
        if folder is not None:
            yield folder
            yield from (folder / name for name in names)
    yield from (_SYSTEM_FOLDER / name for name in names)


def find_path(name: str, root: Path | None) -> Path:
    """Return the path of a folder or an .npz file. Raises DataError if there is none."""
    path = Path(name).expanduser()
    if not path.exists():
        found = (place for place in _places(root, name) if place.exists() and place.name == path.name)
        path = next(found, path)
    if not path.exists():
        raise DataError(f"found no data set at {name}: give a folder, an .npz file or one of {', '.join(DATASETS)}")
    if not path.is_dir() and path.suffix != ".npz":
        raise DataError(f"{path} is neither a folder nor an .npz file")
    return path
