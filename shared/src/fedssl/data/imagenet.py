"""Subsets of ImageNet, as their authors distribute them: Tiny-ImageNet, Mini-ImageNet and ImageNet-100.

Classes are numbered in the order of their WordNet ids, as in torchvision's ImageFolder.
"""

import csv
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from fedssl.data.image_files import ImageFiles
from fedssl.data.trees import FolderTree, Tree, ZipTree, is_image
from fedssl.errors import DataError

TINY_ZIP, TINY_FOLDER = "tiny-imagenet-200.zip", "tiny-imagenet-200"
IMAGENET100_LIST = "imagenet100.txt"
MINI_LISTS = ("train.csv", "val.csv", "test.csv")

_WORDNET_ID = re.compile(r"n\d{8}")
_MINI_TEST_PART = 6  # the last sixth of each class's 600 images are test images


def find_tiny(folder: Path) -> Path | None:
    """Return the path of Tiny-ImageNet in `folder`: the unpacked set, otherwise the archive, or None."""
    if (folder / "wnids.txt").is_file() and (folder / "train").is_dir() and (folder / "val").is_dir():
        return folder
    return folder / TINY_ZIP if (folder / TINY_ZIP).is_file() else None


def list_tiny(path: Path, split: str) -> ImageFiles:
    """List Tiny-ImageNet: 200 classes, 64 x 64 pixels. The papers test on `val`; the images in `test` have no labels.

    Args:
        path: the folder or the archive that :func:`find_tiny` found.
        split: "train" is `train/<class>/images/*.JPEG`; "test" is `val/images/*.JPEG` with the classes in
            `val_annotations.txt`. Class folders without `images`, and a `val` that was sorted into class folders, are
            read too.

    Raises:
        DataError: a file is missing, or the files do not fit together.
    """
    tree, prefix = (ZipTree(path), f"{TINY_FOLDER}/") if path.suffix == ".zip" else (FolderTree(path), "")
    classes = sorted(_wordnet_ids(tree, f"{prefix}wnids.txt"))
    numbers = {name: number for number, name in enumerate(classes)}
    if split == "train":
        found = _by_class(tree, f"{prefix}train", classes)
    else:
        found = _tiny_val(tree, f"{prefix}val", classes)
        found.sort(key=lambda item: item[0].rpartition("/")[2])  # the same order for both layouts
    labels = np.array([numbers[name] for _, name in found], np.int64)
    names = _class_words(tree, f"{prefix}words.txt", classes)
    return _files("Tiny-ImageNet", tree, [name for name, _ in found], labels, names)


def find_mini(folder: Path) -> Path | None:
    """Return `folder` if it holds Mini-ImageNet, the three lists of Ravi and Larochelle and the images, or None."""
    complete = (folder / "images").is_dir() and all((folder / name).is_file() for name in MINI_LISTS)
    return folder if complete else None


def list_mini(path: Path, split: str) -> ImageFiles:
    """List Mini-ImageNet: 100 classes of 600 images.

    Its lists split the classes (64, 16 and 20) for few-shot learning. FedU trains on all classes, so here the images of
    each class are split: in the order of their names, the last sixth are test images and the others training images
    (10,000 and 50,000).

    Args:
        path: a folder with train.csv, val.csv and test.csv (columns `filename` and `label`) and `images/`.
        split: "train" or "test".

    Raises:
        DataError: a list or an image is missing, or they do not fit together.
    """
    tree = FolderTree(path)
    by_class: dict[str, list[str]] = {}
    seen: set[str] = set()
    for name in MINI_LISTS:
        for image, label in _mini_rows(tree, name):
            if image in seen:
                raise DataError(f"{path / name} lists {image} twice; fetch the lists again")
            seen.add(image)
            by_class.setdefault(label, []).append(image)
    if missing := sorted(seen - set(tree.images("images"))):
        raise DataError(
            f"{path / 'images'} lacks {len(missing):,} of the {len(seen):,} listed images, for example {missing[0]}: "
            "put all of them there"
        )
    classes = sorted(by_class)
    names, labels = [], []
    for number, label in enumerate(classes):
        images = sorted(by_class[label])
        cut = len(images) - len(images) // _MINI_TEST_PART
        chosen = images[:cut] if split == "train" else images[cut:]
        names += [f"images/{image}" for image in chosen]
        labels += [number] * len(chosen)
    return _files("Mini-ImageNet", tree, names, np.array(labels, np.int64), classes)


def find_imagenet100(folder: Path) -> Path | None:
    """Return `folder` if it holds ImageNet-100, or None.

    The images must be sorted into classes. The list must be in the folder or next to it, or there must be exactly 100
    classes.
    """
    if not ((folder / "train").is_dir() and (folder / "val").is_dir()):
        return None
    if _list_beside(folder) is not None:
        return folder
    return folder if sum(map(_is_wordnet_id, FolderTree(folder).folders("train"))) == 100 else None


def list_imagenet100(path: Path, split: str) -> ImageFiles:
    """List ImageNet-100: the 100 classes of ImageNet that a list names (Tian et al., Contrastive Multiview Coding).

    Args:
        path: a folder with `train/<class>/*.JPEG` and `val/<class>/*.JPEG`, of these classes or of all of ImageNet. The
            list, imagenet100.txt, is in the folder or next to it; without a list, all classes of the folder are taken.
        split: "train", or "test", which is ImageNet's `val`.

    Raises:
        DataError: the list is damaged, or a class has no images.
    """
    tree = FolderTree(path)
    listed = _list_beside(path)
    classes = sorted(
        filter(_is_wordnet_id, tree.folders("train"))
        if listed is None
        else _wordnet_ids(FolderTree(listed.parent), listed.name)
    )
    part = "train" if split == "train" else "val"
    found = _by_class(tree, part, classes)
    numbers = {name: number for number, name in enumerate(classes)}
    labels = np.array([numbers[name] for _, name in found], np.int64)
    return _files("ImageNet-100", tree, [name for name, _ in found], labels, classes)


def _files(title: str, tree: Tree, names: Sequence[str], labels: np.ndarray, class_names: Iterable[str]) -> ImageFiles:
    if not names:
        raise DataError(f"{tree.path} holds no images of this split; unpack or fetch {title} again")
    return ImageFiles(title, tree, tuple(names), labels, tuple(class_names))


def _by_class(tree: Tree, part: str, classes: Sequence[str]) -> list[tuple[str, str]]:
    """Return (file, class) of all images in `part/<class>` and `part/<class>/images`.

    Raises DataError if a class is empty.
    """
    found = []
    for name in classes:
        folders = (f"{part}/{name}", f"{part}/{name}/images")
        images = [f"{folder}/{image}" for folder in folders for image in tree.images(folder)]
        if not images:
            raise DataError(f"{tree.path} has no images of the class {name} in {part}: unpack or fetch it again")
        found += [(image, name) for image in images]
    return found


def _tiny_val(tree: Tree, part: str, classes: Sequence[str]) -> list[tuple[str, str]]:
    """Return (file, class) of the validation images."""
    images = tree.images(f"{part}/images")
    if not images:
        return _by_class(tree, part, classes)
    annotations = f"{part}/val_annotations.txt"
    rows = (line.split("\t") for line in tree.text(annotations).splitlines() if line.strip())
    labels = {row[0]: row[1].strip() for row in rows if len(row) >= 2}
    known = set(classes)
    for image in images:
        if labels.get(image) not in known:
            raise DataError(f"{tree.path / annotations} has no class of wnids.txt for {image}; fetch the set again")
    return [(f"{part}/images/{image}", labels[image]) for image in images]


def _mini_rows(tree: FolderTree, name: str) -> list[tuple[str, str]]:
    """Return (file, class) of one list. A file's name must not be a path, because the list comes from a third party."""
    rows = list(csv.reader(tree.text(name).splitlines()))
    if not rows or [cell.strip() for cell in rows[0]] != ["filename", "label"]:
        raise DataError(f"{tree.path / name} must begin with the line filename,label; fetch the list again")
    found = []
    for row in rows[1:]:
        if len(row) != 2 or "/" in row[0] or not is_image(row[0]) or not row[1].strip():
            raise DataError(f"{tree.path / name} has the line {','.join(row)[:80]!r}, not an image and its class")
        found.append((row[0].strip(), row[1].strip()))
    return found


def _list_beside(folder: Path) -> Path | None:
    return next(
        (path for path in (folder / IMAGENET100_LIST, folder.parent / IMAGENET100_LIST) if path.is_file()), None
    )


def _wordnet_ids(tree: Tree, name: str) -> list[str]:
    """Return the first word of each line. Raises DataError unless all are WordNet ids."""
    ids = [line.split()[0] for line in tree.text(name).splitlines() if line.strip()]
    if not ids or len(set(ids)) != len(ids) or not all(map(_is_wordnet_id, ids)):
        raise DataError(f"{tree.path / name} must hold one WordNet id per line (n02869837), each once")
    return ids


def _is_wordnet_id(name: str) -> bool:
    return _WORDNET_ID.fullmatch(name) is not None


def _class_words(tree: Tree, name: str, classes: Sequence[str]) -> list[str]:
    """Return the first name that words.txt has for each class, or the class's id if there is no name."""
    rows = (line.partition("\t") for line in (tree.text(name).splitlines() if tree.has(name) else ()))
    words = {identifier: text.partition(",")[0].strip() for identifier, _, text in rows}
    return [words.get(identifier) or identifier for identifier in classes]
