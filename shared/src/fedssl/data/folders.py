"""Image folders: one sub-folder a class, or loose images without labels."""

import os
from pathlib import Path

import numpy as np

from fedssl.data.decoding import ImageFiles, decode_to_memory, shape_of_first
from fedssl.data.images import ImageData
from fedssl.data.trees import SUFFIXES, FolderTree
from fedssl.errors import DataError


def read_folder(folder: Path, split: str, image_size: int | None = None, channels: int | None = None) -> ImageData:
    """Decodes all images below a folder, into memory: somebody's own images are copied to nowhere else.

    Args:
        folder: the data set, as :func:`list_folder` has it.
        split: "train" or "test".
        image_size: shorter side after scaling, in pixels; the middle square is cut out. None: the shorter side of the
            first image.
        channels: 3 or 1; None: 1 if the first image is grey, else 3.

    Raises:
        DataError: there are no images, or one cannot be decoded; the message names it.
    """
    files = list_folder(folder, split)
    shape = shape_of_first(files, image_size, channels)
    return ImageData(decode_to_memory(files, *shape), files.labels, files.class_names)


def list_folder(folder: Path, split: str) -> ImageFiles:
    """The images below a folder, not decoded.

    The classes are the sub-folders in the order of their names, and so are the images of a class. Images that lie in
    the folder itself are unlabelled. A folder with sub-folders `train` and `test` (or `val`, where there is no `test`)
    holds both splits; any other is a training split.

    Raises:
        DataError: there are none, or the folder cannot be read.
    """
    tree = FolderTree(_split_folder(folder, split))
    classes, loose = tree.folders(""), tree.images("")
    if loose and classes:
        raise DataError(
            f"{tree.path} holds both images and sub-folders: move the images into a class, or the folders away"
        )
    names = loose or [f"{name}/{image}" for name in classes for image in tree.images(name)]
    if not names:
        packed = next((path.name for path in sorted(tree.path.glob("*.npz"))), None) if tree.path.is_dir() else None
        hint = f", or name the file: {packed}" if packed else ""
        raise DataError(
            f"{tree.path} holds no images: put them into one sub-folder a class ({', '.join(SUFFIXES)}){hint}"
        )
    if loose:
        return ImageFiles(str(folder), tree, tuple(names))
    numbers = {name: number for number, name in enumerate(classes)}
    labels = np.array([numbers[name.partition("/")[0]] for name in names], np.int64)
    return ImageFiles(str(folder), tree, tuple(names), labels, tuple(_readable(name) for name in classes))


def _readable(name: str) -> str:
    """A folder's name as a text: what is not UTF-8 in it can be shown and sent nowhere."""
    return os.fsencode(name).decode("utf-8", errors="replace")


def _split_folder(folder: Path, split: str) -> Path:
    has = {name: (folder / name).is_dir() for name in ("train", "test", "val")}
    if has["train"] and (has["test"] or has["val"]):
        return folder / ("val" if split == "test" and not has["test"] else split)
    if split == "test":
        raise DataError(f"{folder} has no test images: give it two sub-folders, train and test")
    return folder
