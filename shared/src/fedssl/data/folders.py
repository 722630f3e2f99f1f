"""Image folders: one sub-folder per class, with images at any depth, or loose images without labels."""

import logging
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedssl.data.contents import Contents, list_classes, read_contents, readable
from fedssl.data.decode_file import shape_of_first
from fedssl.data.decoding import decode_to_memory, log
from fedssl.data.image_files import ImageFiles
from fedssl.data.images import ImageData
from fedssl.data.reading import Reading
from fedssl.data.trees import SUFFIXES, FolderTree
from fedssl.data.unusual import report_unusual
from fedssl.errors import DataError
from fedssl.wording import plural


def read_folder(
    folder: Path,
    split: str,
    image_size: int | None,
    channels: int | None,
    reading: Reading,
) -> ImageData:
    """Decode all images below a folder into memory. A data owner's own images are not copied to any other place.

    What is not used is logged, and so are images of one value and equal images, which are used.

    Args:
        folder: the data set, laid out as in :func:`list_folder`.
        split: "train" or "test".
        image_size: the shorter side after scaling, in pixels; the middle square is cut out. None means the shorter side
            of the first image.
        channels: 1 to 16; None means those of the first image, of 8 bits: 1 if it is grey, else 3.
        reading: how the files become pixels.

    Raises:
        DataError: there are no images, or more cannot be decoded than `reading` tolerates; the message names them.
    """
    files = replace(list_folder(folder, split), reading=reading)
    shape = shape_of_first(files, image_size, channels)
    pixels, unreadable = decode_to_memory(files, *shape)
    labels, groups = (None if each is None else np.delete(each, unreadable) for each in (files.labels, files.groups))
    report_left_out(files)
    report_unusual(files, pixels, unreadable)
    return ImageData(pixels, labels, files.class_names, unreadable, groups)


def list_folder(folder: Path, split: str) -> ImageFiles:
    """List the images below a folder without decoding them.

    The classes are the sub-folders in the order of their names. Their images may lie at any depth: those of a folder
    come in the order of their names, before those of its sub-folders. Images in the folder itself are unlabelled. A
    folder with sub-folders `train` and `test` (or `val` if there is no `test`) holds both splits; any other folder is a
    training split. A class has one number in both splits, also if one of them has no folder of it: the training
    split's classes come first, and then those that only the test split has.

    Raises:
        DataError: there are no images, or the folder cannot be read.
    """
    tree = FolderTree(split_folder(folder, split))
    found = read_contents(tree.path)
    if found.loose and found.by_class:
        raise DataError(
            f"{tree.path} holds both images ({_first(found.loose)}) and sub-folders "
            f"({_first(tuple(found.by_class))}): move the images into a sub-folder, or remove either"
        )
    names = found.loose or tuple(name for images in found.by_class.values() for name in images)
    if not names:
        raise DataError(_no_images(tree.path, found))
    groups = _group_numbers(names, found)
    if found.loose:
        return ImageFiles(str(folder), tree, names, contents=found, groups=groups)
    trained = list_classes(split_folder(folder, "train")) if split == "test" else ()
    classes = tuple(dict.fromkeys((*trained, *found.by_class)))
    number_of = {name: number for number, name in enumerate(classes)}
    sizes = [len(images) for images in found.by_class.values()]
    labels = np.repeat(np.array([number_of[name] for name in found.by_class], np.int64), sizes)
    return ImageFiles(str(folder), tree, names, labels, tuple(map(readable, classes)), found, groups=groups)


def _group_numbers(names: tuple[str, ...], found: Contents) -> NDArray[np.int64] | None:
    """Return one number per patient; an image without a patient has its own number.

    Returns None if no image names a patient.
    """
    if not found.groups:
        return None
    rest = iter(range(len(found.groups), len(found.groups) + len(names)))
    return np.array([found.groups[name] if name in found.groups else next(rest) for name in names], np.int64)


def list_all(folder: Path) -> ImageFiles:
    """List all images of a folder at any depth, without labels and without decoding them.

    Those of a folder come in the order of their names, before those of its sub-folders. Raises DataError if there are
    none, or if the folder cannot be read.
    """
    found = read_contents(folder)
    names = (*found.loose, *(name for images in found.by_class.values() for name in images))
    if not names:
        raise DataError(_no_images(folder, found))
    return ImageFiles(str(folder), FolderTree(folder), names, contents=found, groups=_group_numbers(names, found))


def report_left_out(files: ImageFiles) -> None:
    """Log what a folder holds besides the images that are listed, if there is anything."""
    if files.contents is not None and (text := files.contents.describe()):
        level = logging.INFO if files.contents.is_complete else logging.WARNING
        log.log(level, "%s: found %s; %s", files.title, plural(len(files), "image"), text)


def split_folder(folder: Path, split: str) -> Path:
    """Return the sub-folder of a split, or the folder itself if it holds only training images. Raises DataError."""
    has = {name: (folder / name).is_dir() for name in ("train", "test", "val")}
    if has["train"] and (has["test"] or has["val"]):
        return folder / ("val" if split == "test" and not has["test"] else split)
    if split == "test":
        raise DataError(f"{folder} has no test images: give it two sub-folders, train and test")
    return folder


def _first(names: tuple[str, ...]) -> str:
    return ", ".join(map(readable, names[:3])) + ", ..." * (len(names) > 3)


def _no_images(path: Path, found: Contents) -> str:
    seen = f" that can be read; {text}. Put images" if (text := found.describe()) else ": put them"
    return f"{path} holds no images{seen} into one sub-folder per class ({', '.join(SUFFIXES)})"
