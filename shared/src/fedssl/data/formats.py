"""Readers for the array formats: idx (MNIST and its kin), CIFAR's binary files, `.npz`. Nothing is ever unpickled."""

import gzip
import math
import zipfile
import zlib
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedssl.data.images import ImageData
from fedssl.errors import DataError

_IDX_UINT8 = 8  # the format's code for unsigned bytes, the only type that image sets use
_ARRAY_ERRORS = (OSError, EOFError, ValueError, KeyError, zipfile.BadZipFile, zlib.error)


def read_idx(path: Path) -> NDArray[np.uint8]:
    """The array in an idx file of unsigned bytes, gzip-compressed if its name ends in `.gz`.

    Raises:
        DataError: the file cannot be read, or its length is not what its header announces.
    """
    try:
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"cannot read {path}: {error}; fetch the file again") from error
    if len(content) < 4 or content[0] or content[1] or content[2] != _IDX_UINT8:
        raise DataError(f"{path} is not an idx file of unsigned bytes; fetch the file again")
    start = 4 + 4 * content[3]
    shape = tuple(int(n) for n in np.frombuffer(content[4:start], dtype=">u4"))
    if len(shape) != content[3] or len(content) - start != math.prod(shape):
        raise DataError(f"{path} is cut short or damaged: its length does not match its header; fetch the file again")
    return np.frombuffer(content, np.uint8, offset=start).reshape(shape)


def read_idx_pair(images: Path, labels: Path, class_names: tuple[str, ...]) -> ImageData:
    """One split of an MNIST-like set: images (N, H, W) of one channel and labels (N,)."""
    pixels, numbers = read_idx(images), read_idx(labels)
    if pixels.ndim != 3 or numbers.shape != (len(pixels),):
        raise DataError(f"{images} has shape {pixels.shape} and {labels} {numbers.shape}: they do not belong together")
    return ImageData(pixels[:, np.newaxis], numbers.astype(np.int64), class_names)


def read_cifar(files: list[Path], label_bytes: int, names: Path | None) -> ImageData:
    """CIFAR's binary version: records of `label_bytes` (the last one is taken) and 3 x 32 x 32 bytes.

    Args:
        files: in order; CIFAR-10's training set has five.
        label_bytes: 1 for CIFAR-10, 2 for CIFAR-100 (coarse, then fine).
        names: text file of class names, one a line, or None.

    Raises:
        DataError: a file cannot be read or does not hold whole records.
    """
    length = label_bytes + 3 * 32 * 32
    records: list[NDArray[np.uint8]] = []
    for path in files:
        try:
            content = np.fromfile(path, np.uint8)
        except OSError as error:
            raise DataError(f"cannot read {path}: {error}") from error
        if content.size == 0 or content.size % length:
            raise DataError(f"{path} is cut short or not CIFAR's binary version (records of {length} bytes)")
        records.append(content.reshape(-1, length))
    table = np.concatenate(records)
    lines = names.read_text(encoding="ascii").split() if names is not None and names.is_file() else []
    images = np.ascontiguousarray(table[:, label_bytes:]).reshape(-1, 3, 32, 32)
    return ImageData(images, table[:, label_bytes - 1].astype(np.int64), tuple(lines))


def read_npz(path: Path, split: str) -> ImageData:
    """One split of an `.npz` file.

    Keys: `images` (uint8, (N, H, W), (N, H, W, C) or (N, C, H, W)), `labels` (whole numbers (N,), may be missing) and
    `class_names` (strings, may be missing). The test split has the same keys with `test_` before them.

    Raises:
        DataError: the file cannot be read, a key is missing or an array is not as described.
    """
    prefix = "" if split == "train" else "test_"
    if not zipfile.is_zipfile(path):
        raise DataError(f"{path} is not an .npz file, or is damaged; write it with fedssl.data.save_npz")
    try:
        with np.load(path, allow_pickle=False) as archive:
            keys = set(archive.files)
            if f"{prefix}images" not in keys:
                raise DataError(
                    f"{path} has no array {prefix}images (its arrays: {', '.join(sorted(keys)) or 'none'}); "
                    f"write it with fedssl.data.save_npz, which takes the test images too"
                )
            images = archive[f"{prefix}images"]
            labels = archive[f"{prefix}labels"] if f"{prefix}labels" in keys else None
            names = archive["class_names"].tolist() if "class_names" in keys else []
    except _ARRAY_ERRORS as error:
        raise DataError(f"cannot read {path}: {error}; it must be an .npz file of plain arrays") from error
    return ImageData(_channels_first(images, path), _whole_numbers(labels, path), tuple(str(name) for name in names))


def save_npz(path: Path, data: ImageData, test: ImageData | None = None) -> None:
    """Writes images, and labels and class names where there are any, for :func:`read_npz`; `test` is the test split."""
    arrays: dict[str, NDArray[np.generic]] = {"images": data.images}
    if data.labels is not None:
        arrays["labels"] = data.labels
    if data.class_names:
        arrays["class_names"] = np.array(data.class_names)
    if test is not None:
        arrays["test_images"] = test.images
        if test.labels is not None:
            arrays["test_labels"] = test.labels
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:  # an open file: np.savez would add a suffix to a name without one
        np.savez(file, allow_pickle=False, **arrays)


def _channels_first(images: NDArray[np.generic], path: Path) -> NDArray[np.uint8]:
    if images.dtype != np.uint8:
        raise DataError(f"{path}: images must be uint8 (0..255), not {images.dtype}; convert them before saving")
    pixels = images.astype(np.uint8, copy=False)
    if pixels.ndim == 3:
        return pixels[:, np.newaxis]
    if pixels.ndim == 4 and pixels.shape[1] in (1, 3):
        return pixels
    if pixels.ndim == 4 and pixels.shape[3] in (1, 3):
        return np.ascontiguousarray(pixels.transpose(0, 3, 1, 2))
    raise DataError(
        f"{path}: images must have shape (N, H, W), (N, H, W, C) or (N, C, H, W) with C 1 or 3; got {images.shape}"
    )


def _whole_numbers(labels: NDArray[np.generic] | None, path: Path) -> NDArray[np.int64] | None:
    if labels is None:
        return None
    if labels.dtype.kind not in "iu":
        raise DataError(f"{path}: labels must be whole numbers, not {labels.dtype}")
    return labels.astype(np.int64)
