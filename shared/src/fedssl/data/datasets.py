"""Data sets by name or path."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F

from fedssl.data.folders import read_folder
from fedssl.data.formats import read_cifar, read_idx_pair, read_npz
from fedssl.data.images import ImageData
from fedssl.errors import DataError

Split = Literal["train", "test"]

DATASETS = ("fashion-mnist", "cifar10", "cifar100", "digits")
"""The names that :func:`load_dataset` knows; anything else is a path."""

DATA_VARIABLE = "FEDSSL_DATA"
"""Environment variable: a folder to look for data sets in."""

FASHION_MNIST_CLASSES = (
    "T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot",
)  # fmt: skip

_SYSTEM_FOLDER = Path("/usr/share/datasets")  # where Debian's data set packages put theirs
_NUM_DIGITS_TRAIN = 1437


def load_dataset(
    name_or_path: str,
    split: Split,
    root: Path | None = None,
    *,
    image_size: int | None = None,
    channels: Literal[1, 3] | None = None,
) -> ImageData:
    """Reads one split of a data set.

    Args:
        name_or_path: one of :data:`DATASETS`, an image folder, or an `.npz` file. A relative path is looked up in the
            working directory, then in `root` and the folder that `FEDSSL_DATA` names.
        split: "train" or "test".
        root: folder of data sets, looked through first; then come `FEDSSL_DATA` and `/usr/share/datasets`. A set may
            lie in the folder itself or in a sub-folder of its name.
        image_size: image folders only: the size to decode to; None takes the first image's. Other formats have a size
            of their own; :func:`fedssl.data.conform` changes it.
        channels: image folders only: 1 or 3; None goes by the first image.

    Raises:
        DataError: the data cannot be found or read; the message says what to do.
    """
    if split not in ("train", "test"):
        raise DataError(f"there is no split {split!r}: it is train or test")
    match name_or_path:
        case "fashion-mnist":
            return _fashion_mnist(split, root)
        case "cifar10" | "cifar100":
            return _cifar(name_or_path, split, root)
        case "digits":
            return _digits(split)
    path = _find_path(name_or_path, root)
    if path.is_dir():
        return read_folder(path, split, image_size, channels)
    if path.suffix == ".npz":
        return read_npz(path, split)
    raise DataError(f"{path} is neither a folder nor an .npz file")


def find_fashion_mnist(root: Path | None = None) -> Path | None:
    """The folder that holds all four idx files of Fashion-MNIST, looked for as in :func:`load_dataset`, or None."""
    for folder in _places(root, "fashion-mnist", "FashionMNIST/raw"):
        if all(_idx_file(folder, split, kind) for split in ("train", "test") for kind in ("images", "labels")):
            return folder
    return None


def _places(root: Path | None, *names: str) -> Iterator[Path]:
    """Where a data set may lie, in order."""
    variable = os.environ.get(DATA_VARIABLE)
    for folder in (root, Path(variable) if variable else None):
        if folder is not None:
            yield folder
            yield from (folder / name for name in names)
    yield from (_SYSTEM_FOLDER / name for name in names)


def _find_path(name: str, root: Path | None) -> Path:
    path = Path(name).expanduser()
    if path.exists():
        return path
    for candidate in _places(root, name):
        if candidate.exists() and candidate.name == path.name:
            return candidate
    raise DataError(f"found no data set at {name}: give a folder, an .npz file or one of {', '.join(DATASETS)}")


def _idx_file(folder: Path, split: str, kind: Literal["images", "labels"]) -> Path | None:
    stem = f"{'train' if split == 'train' else 't10k'}-{kind}-idx{3 if kind == 'images' else 1}-ubyte"
    return next((path for path in (folder / f"{stem}.gz", folder / stem) if path.is_file()), None)


def _fashion_mnist(split: Split, root: Path | None) -> ImageData:
    folder = find_fashion_mnist(root)
    images = _idx_file(folder, split, "images") if folder else None
    labels = _idx_file(folder, split, "labels") if folder else None
    if images is None or labels is None:
        raise DataError(
            "found no Fashion-MNIST: fedssl.data.fetch_fashion_mnist gets it, the Debian package dataset-fashion-mnist "
            f"installs it, or put its four idx files into a folder and set {DATA_VARIABLE} to that folder"
        )
    return read_idx_pair(images, labels, FASHION_MNIST_CLASSES)


def _cifar(name: str, split: Split, root: Path | None) -> ImageData:
    ten = name == "cifar10"
    folder_name = "cifar-10-batches-bin" if ten else "cifar-100-binary"
    train = [f"data_batch_{i}.bin" for i in range(1, 6)] if ten else ["train.bin"]
    files = train if split == "train" else ["test_batch.bin" if ten else "test.bin"]
    for folder in _places(root, folder_name, name, f"{name}/{folder_name}"):
        if all((folder / file).is_file() for file in files):
            labels = folder / ("batches.meta.txt" if ten else "fine_label_names.txt")
            return read_cifar([folder / file for file in files], 1 if ten else 2, labels)
    raise DataError(
        f"found no {name}: unpack its authors' binary version (folder {folder_name}) and set {DATA_VARIABLE} to the "
        "folder that holds it; their Python version is a pickle and is not read. An image folder works too, by its path"
    )


def _digits(split: Split) -> ImageData:
    """scikit-learn's 1,797 digits of 8x8 pixels and 17 grey values, enlarged to 16x16 so that three halvings fit.

    The last 360 are the test split: other hands wrote them.
    """
    from sklearn.datasets import load_digits

    bunch = load_digits()
    grey = torch.from_numpy(np.asarray(bunch.images, np.float32)).unsqueeze(1) * (255 / 16)
    pixels = F.interpolate(grey, scale_factor=2, mode="bilinear", align_corners=False).round_().to(torch.uint8).numpy()
    labels = np.asarray(bunch.target, np.int64)
    part = slice(None, _NUM_DIGITS_TRAIN) if split == "train" else slice(_NUM_DIGITS_TRAIN, None)
    return ImageData(pixels[part], labels[part], tuple(str(digit) for digit in range(10)))
