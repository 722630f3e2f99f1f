"""The data sets that are known by name: the files that their authors distribute, and how they are read."""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Final, Literal

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from fedssl.data.formats import read_cifar, read_idx_pair
from fedssl.data.image_files import ImageFiles
from fedssl.data.imagenet import (
    find_imagenet100,
    find_mini,
    find_tiny,
    list_imagenet100,
    list_mini,
    list_tiny,
)
from fedssl.data.images import ImageData
from fedssl.data.svhn import read_svhn
from fedssl.errors import DataError

Split = Literal["train", "test"]

FASHION_MNIST_CLASSES = (
    "T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot",
)  # fmt: skip
_NUM_DIGITS_TRAIN = 1437


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownDataset:
    """One data set.

    Attributes:
        name: its name in specs and commands.
        title: its name in messages.
        num_classes, num_train, num_test: as published.
        channels, image_size: the default shape of the images.
        files: the files that must be in the folder of data sets, or in one of `folders`.
        source: where its authors distribute it.
        folders: sub-folders of a folder of data sets that are searched for it, besides the folder itself.
        find: returns the path of a split in a folder, or None if the folder does not hold it. Without `find`, the set
            needs no files.
        fetchable: whether `fedssl data fetch` can download it.
        read: reads a split whose images are stored as arrays, from the path that `find` returned.
        listing: lists a split whose images are stored as files, which are decoded to the requested size.
    """

    name: str
    title: str
    num_classes: int
    num_train: int
    num_test: int
    channels: Literal[1, 3] = 3
    image_size: int = 32
    files: str
    source: str
    fetchable: bool = False
    folders: tuple[str, ...] = ()
    find: Callable[[Path, Split], Path | None] | None = None
    read: Callable[[Path, Split], ImageData] | None = None
    listing: Callable[[Path, Split], ImageFiles] | None = None


def fashion_mnist_file(folder: Path, split: str, kind: Literal["images", "labels"]) -> Path | None:
    """Return the path of an idx file, compressed or not, or None if there is no such file."""
    stem = f"{'train' if split == 'train' else 't10k'}-{kind}-idx{3 if kind == 'images' else 1}-ubyte"
    return next((path for path in (folder / f"{stem}.gz", folder / stem) if path.is_file()), None)


def _find_fashion_mnist(folder: Path, _: Split) -> Path | None:
    complete = all(fashion_mnist_file(folder, split, kind) for split in ("train", "test") for kind in _KINDS)
    return folder if complete else None


def _read_fashion_mnist(folder: Path, split: Split) -> ImageData:
    images, labels = (fashion_mnist_file(folder, split, kind) for kind in _KINDS)
    if images is None or labels is None:
        raise DataError(f"{folder} lost its Fashion-MNIST files; fetch them again")
    return read_idx_pair(images, labels, FASHION_MNIST_CLASSES)


def _cifar_files(num_classes: int, split: str) -> list[str]:
    if num_classes == 10:
        return [f"data_batch_{i}.bin" for i in range(1, 6)] if split == "train" else ["test_batch.bin"]
    return ["train.bin" if split == "train" else "test.bin"]


def _find_cifar(num_classes: int) -> Callable[[Path, Split], Path | None]:
    def find(folder: Path, split: Split) -> Path | None:
        return folder if all((folder / name).is_file() for name in _cifar_files(num_classes, split)) else None

    return find


def _read_cifar(num_classes: int) -> Callable[[Path, Split], ImageData]:
    def read(folder: Path, split: Split) -> ImageData:
        names = folder / ("batches.meta.txt" if num_classes == 10 else "fine_label_names.txt")
        return read_cifar([folder / name for name in _cifar_files(num_classes, split)], num_classes, names)

    return read


def _find_svhn(folder: Path, split: Split) -> Path | None:
    path = folder / f"{split}_32x32.mat"
    return path if path.is_file() else None


def _read_digits(_: Path, split: Split) -> ImageData:
    """Return scikit-learn's digits: 1,797 images of 8x8 pixels and 17 grey values, enlarged to 16x16.

    At 16x16 an encoder can halve the image three times. The last 360 are the test split: other people wrote them.
    """
    pixels, labels = _digits(_digits_file())
    part = slice(None, _NUM_DIGITS_TRAIN) if split == "train" else slice(_NUM_DIGITS_TRAIN, None)
    return ImageData(pixels[part].copy(), labels[part].copy(), tuple(str(digit) for digit in range(10)))


@functools.cache  # parsing the text takes 50 ms, and a process reads it for every split and use
def _digits(path: Path) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Return the images (1797, 1, 16, 16) and labels (1797,) of scikit-learn's file."""
    rows = np.loadtxt(path, np.float32, delimiter=",")  # 64 pixels and the label
    grey = torch.from_numpy(rows[:, :-1].reshape(-1, 1, 8, 8)) * (255 / 16)
    pixels = F.interpolate(grey, scale_factor=2, mode="bilinear", align_corners=False).round_().to(torch.uint8).numpy()
    return pixels, rows[:, -1].astype(np.int64)


def _digits_file() -> Path:
    """Return the path of scikit-learn's file. Importing scikit-learn would cost every process a second."""
    package = find_spec("sklearn")
    if package is None or package.origin is None:
        raise ModuleNotFoundError("No module named 'sklearn'", name="sklearn")
    return Path(package.origin).parent / "datasets" / "data" / "digits.csv.gz"


_KINDS: tuple[Literal["images"], Literal["labels"]] = ("images", "labels")
_KRIZHEVSKY = "https://www.cs.toronto.edu/~kriz/cifar.html"

_ALL = (
    KnownDataset(
        name="fashion-mnist", title="Fashion-MNIST", num_classes=10, num_train=60_000, num_test=10_000, channels=1,
        image_size=28, files="its four idx files (train-images-idx3-ubyte.gz ...)",
        source="https://github.com/zalandoresearch/fashion-mnist, or the Debian package dataset-fashion-mnist",
        folders=("fashion-mnist", "FashionMNIST/raw"),
        fetchable=True, find=_find_fashion_mnist, read=_read_fashion_mnist,
    ),
    KnownDataset(
        name="cifar10", title="CIFAR-10", num_classes=10, num_train=50_000, num_test=10_000,
        files="cifar-10-batches-bin/, unpacked from cifar-10-binary.tar.gz (the Python version is a pickle and is not "
        "read)",
        source=_KRIZHEVSKY, folders=("cifar-10-batches-bin", "cifar10", "cifar10/cifar-10-batches-bin"),
        fetchable=True, find=_find_cifar(10), read=_read_cifar(10),
    ),
    KnownDataset(
        name="cifar100", title="CIFAR-100", num_classes=100, num_train=50_000, num_test=10_000,
        files="cifar-100-binary/, unpacked from cifar-100-binary.tar.gz (the Python version is a pickle and is not "
        "read)",
        source=_KRIZHEVSKY, folders=("cifar-100-binary", "cifar100", "cifar100/cifar-100-binary"),
        fetchable=True, find=_find_cifar(100), read=_read_cifar(100),
    ),
    KnownDataset(
        name="svhn", title="SVHN", num_classes=10, num_train=73_257, num_test=26_032,
        files="train_32x32.mat and test_32x32.mat (the cropped digits)",
        source="http://ufldl.stanford.edu/housenumbers", folders=("svhn", "SVHN"),
        fetchable=True, find=_find_svhn, read=lambda path, split: read_svhn(path),
    ),
    KnownDataset(
        name="tiny-imagenet", title="Tiny-ImageNet", num_classes=200, num_train=100_000, num_test=10_000, image_size=64,
        files="tiny-imagenet-200.zip as it is, or the folder tiny-imagenet-200 unpacked from it",
        source="http://cs231n.stanford.edu/tiny-imagenet-200.zip",
        folders=("tiny-imagenet-200", "tiny-imagenet", "tiny-imagenet/tiny-imagenet-200"),
        fetchable=True, find=lambda folder, split: find_tiny(folder), listing=list_tiny,
    ),
    KnownDataset(
        name="mini-imagenet", title="Mini-ImageNet", num_classes=100, num_train=50_000, num_test=10_000, image_size=84,
        files="mini-imagenet/ with train.csv, val.csv and test.csv (Ravi and Larochelle) and, in images/, the 60,000 "
        "images of ImageNet that they list",
        source="https://github.com/twitter-research/meta-learning-lstm/tree/master/data/miniImagenet and "
        "https://image-net.org",
        folders=("mini-imagenet", "mini_imagenet", "miniImagenet", "miniimagenet"),
        find=lambda folder, split: find_mini(folder), listing=list_mini,
    ),
    KnownDataset(
        name="imagenet-100", title="ImageNet-100", num_classes=100, num_train=126_689, num_test=5_000, image_size=224,
        files="imagenet-100/ (or imagenet/) with train/ and val/ of ImageNet, both in class folders, and next to it or "
        "in it imagenet100.txt, the list of the 100 classes (not needed if the folder holds only these)",
        source="https://image-net.org and https://github.com/HobbitLong/CMC/blob/master/imagenet100.txt",
        folders=("imagenet-100", "imagenet100", "imagenet", "ImageNet"),
        find=lambda folder, split: find_imagenet100(folder), listing=list_imagenet100,
    ),
    KnownDataset(
        name="digits", title="scikit-learn's digits", num_classes=10, num_train=1437, num_test=360, channels=1,
        image_size=16, files="nothing", source="scikit-learn contains it", read=_read_digits,
    ),
)  # fmt: skip

KNOWN: Final[Mapping[str, KnownDataset]] = MappingProxyType({known.name: known for known in _ALL})
"""The known data sets by name."""
