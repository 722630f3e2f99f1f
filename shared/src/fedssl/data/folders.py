"""Image folders: one sub-folder per class, or loose images without labels."""

import os
from pathlib import Path

import numpy as np

from fedssl.data.decoding import ImageFiles, decode_to_memory, shape_of_first
from fedssl.data.images import ImageData
from fedssl.data.trees import SUFFIXES, FolderTree
from fedssl.errors import DataError


def read_folder(folder: Path, split: str, image_size: int | None = None, channels: int | None = None) -> ImageData:
    """Decode all images below a folder into memory. A data owner's own images are not copied to any other place.

    Args:
        folder: the data set, laid out as in :func:`list_folder`.
        split: "train" or "test".
        image_size: the shorter side after scaling, in pixels; the middle square is cut out. None means the shorter side
            of the first image.
        channels: 3 or 1; None means 1 if the first image is grey, else 3.

    Raises:
        DataError: there are no images, or one cannot be decoded; the message names it.
    """
    files = list_folder(folder, split)
    shape = shape_of_first(files, image_size, channels)
    return ImageData(decode_to_memory(files, *shape), files.labels, files.class_names)


def list_folder(folder: Path, split: str) -> ImageFiles:
    """List the images below a folder without decoding them.

    The classes are the sub-folders in the order of their names; the images of a class are in that order too. Images in
    the folder itself are unlabelled. A folder with sub-folders `train` and `test` (or `val` if there is no `test`)
    holds both splits; any other folder is a training split.

    Raises:
        DataError: there are no images, or the folder cannot be read.
    """
    tree = FolderTree(_split_folder(folder, split))
    classes, loose = tree.folders(""), tree.images("")
    if loose and classes:
        raise DataError(
            f"{tree.path} holds both images and sub-folders: move the images into a class, or remove the folders"
        )
    names = loose or [f"{name}/{image}" for name in classes for image in tree.images(name)]
    if not names:
        packed = next((path.name for path in sorted(tree.path.glob("*.npz"))), None) if tree.path.is_dir() else None
        hint = f", or name the file: {packed}" if packed else ""
        raise DataError(
            f"{tree.path} holds no images: put them into one sub-folder per class ({', '.join(SUFFIXES)}){hint}"
        )
    if loose:
        return ImageFiles(str(folder), tree, tuple(names))
    numbers = {name: number for number, name in enumerate(classes)}
    labels = np.array([numbers[name.partition("/")[0]] for name in names], np.int64)
    return ImageFiles(str(folder), tree, tuple(names), labels, tuple(_readable(name) for name in classes))


def _readable(name: str) -> str:
    """Return a folder's name as text, with bytes replaced that are not UTF-8 and could not be displayed or sent."""
    return os.fsencode(name).decode("utf-8", errors="replace")


def _split_folder(folder: Path, split: str) -> Path:
    has = {name: (folder / name).is_dir() for name in ("train", "test", "val")}
    if has["train"] and (has["test"] or has["val"]):
        return folder / ("val" if split == "test" and not has["test"] else split)
    if split == "test":
        raise DataError(f"{folder} has no test images: give it two sub-folders, train and test")
    return folder
