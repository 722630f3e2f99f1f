"""Readers for the array formats: idx (MNIST and its kin), CIFAR's binary files, `.npz`. Nothing is ever unpickled."""

import math
import textwrap
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError

from fedssl.data.array_files import ARRAY_ERRORS, check_members
from fedssl.data.images import ImageData
from fedssl.data.windowing import FULL, NEEDS_WINDOW, Pixels, WindowMissing, window_arrays
from fedssl.errors import DataError
from fedssl.protocol.data import WindowConfig

_IDX_UINT8 = 8  # the format's code for unsigned bytes, the only type that image sets use
_MAX_REASON = 200  # numpy's errors quote the whole header
_MAX_BYTES = 1 << 30  # the largest size of one idx or CIFAR file, uncompressed: five times the largest that exists
_WINDOW = "window"  # the key of a file whose images have been through a window, with its JSON

_GZIP = 31  # zlib's code for a gzip stream


def read_idx(path: Path) -> NDArray[np.uint8]:
    """Read the array in an idx file of unsigned bytes, which is gzip-compressed if its name ends in `.gz`.

    Raises:
        DataError: the file cannot be read, or its length is not what its header announces.
    """
    try:
        content = _read_bounded(path)
    except (OSError, EOFError, ValueError, zlib.error) as error:
        raise DataError(f"cannot read {path}: {error}; fetch the file again") from error
    if len(content) < 4 or content[0] or content[1] or content[2] != _IDX_UINT8:
        raise DataError(f"{path} is not an idx file of unsigned bytes; fetch the file again")
    start = 4 + 4 * content[3]
    shape = tuple(int(n) for n in np.frombuffer(content[4:start], dtype=">u4"))
    if len(shape) != content[3] or len(content) - start != math.prod(shape):
        raise DataError(f"{path} is cut short or damaged: its length does not match its header; fetch the file again")
    return np.frombuffer(content, np.uint8, offset=start).reshape(shape)


def _read_bounded(path: Path) -> bytes:
    if path.stat().st_size > _MAX_BYTES:
        raise ValueError("it is larger than such a file can be")
    content = path.read_bytes()
    if path.suffix != ".gz":
        return content
    inflater = zlib.decompressobj(_GZIP)
    inflated = inflater.decompress(content, _MAX_BYTES)
    if not inflater.eof:
        raise EOFError("it is cut short, or unpacks to more than such a file can hold")
    return inflated


def read_idx_pair(images: Path, labels: Path, class_names: tuple[str, ...]) -> ImageData:
    """Read one split of an MNIST-like set: images (N, H, W) of one channel and labels (N,)."""
    pixels, numbers = read_idx(images), read_idx(labels)
    if pixels.ndim != 3 or numbers.shape != (len(pixels),):
        raise DataError(f"{images} has shape {pixels.shape} and {labels} {numbers.shape}: they do not belong together")
    if numbers.size and int(numbers.max()) >= len(class_names):
        raise DataError(
            f"{labels} has labels above {len(class_names) - 1}: it belongs to another data set, or is damaged"
        )
    return ImageData(pixels[:, np.newaxis], numbers.astype(np.int64), class_names)


def read_cifar(files: list[Path], num_classes: int, names: Path | None) -> ImageData:
    """Read CIFAR's binary version: records of a label (CIFAR-100: a coarse and a fine label) and 3 x 32 x 32 bytes.

    Args:
        files: the files in order; CIFAR-10's training set has five.
        num_classes: 10 or 100.
        names: a text file of class names, one per line, or None.

    Raises:
        DataError: a file cannot be read, does not hold whole records, or has a label that is not a class.
    """
    label_bytes = 1 if num_classes == 10 else 2
    length = label_bytes + 3 * 32 * 32
    records: list[NDArray[np.uint8]] = []
    for path in files:
        try:
            content = np.frombuffer(_read_bounded(path), np.uint8)
        except (OSError, ValueError) as error:
            raise DataError(f"cannot read {path}: {error}; fetch the file again") from error
        if content.size == 0 or content.size % length:
            raise DataError(f"{path} is cut short or not CIFAR's binary version (records of {length} bytes)")
        table = content.reshape(-1, length)
        if int(table[:, label_bytes - 1].max()) >= num_classes:
            raise DataError(f"{path} has labels above {num_classes - 1}: it is not CIFAR-{num_classes}, or damaged")
        records.append(table)
    table = np.concatenate(records)
    images = np.ascontiguousarray(table[:, label_bytes:]).reshape(-1, 3, 32, 32)
    return ImageData(images, table[:, label_bytes - 1].astype(np.int64), _class_names(names))


def _class_names(path: Path | None) -> tuple[str, ...]:
    """Return one name per line, or no names if the file is missing or unreadable, because only people read them."""
    try:
        return tuple(path.read_text(encoding="utf-8", errors="replace").split()) if path is not None else ()
    except OSError:
        return ()


@dataclass(frozen=True, slots=True)
class StoredArrays:
    """One split of an `.npz` file as it is stored, before any window.

    Attributes:
        path: the file.
        pixels: (N, C, H, W), of whole or floating-point numbers.
        labels: int64 class numbers (N,), or None.
        class_names: the classes by number; empty if the file has no names.
        prepared: the window through which the images have been already, or None.
        groups: int64 numbers (N,), equal for the images of one group (a patient), or None.
    """

    path: Path
    pixels: NDArray[np.generic]
    labels: NDArray[np.int64] | None = None
    class_names: tuple[str, ...] = ()
    prepared: WindowConfig | None = None
    groups: NDArray[np.int64] | None = None

    def __len__(self) -> int:
        return len(self.pixels)

    @property
    def needs_window(self) -> bool:
        """True if only a run with a window can use the images."""
        return self.prepared is None and self.pixels.dtype != np.uint8

    def through(self, window: WindowConfig | None, rows: slice = slice(None)) -> Pixels:
        """Return some images through a window; those that are prepared already must have been through this one.

        Raises WindowMissing if the images need a window and there is none, and DataError.
        """
        pixels = self.pixels[rows]
        if self.prepared is not None:
            if pixels.dtype not in FULL or self.prepared != window:
                raise DataError(
                    f"{self.path} holds images that were prepared with data.window = {_in_words(self.prepared)}, but "
                    f"the run's is {'not set' if window is None else _in_words(window)}: give the run that window, or "
                    "prepare the images again"
                )
            return pixels  # type: ignore[return-value]
        if window is None:
            if self.needs_window:
                raise WindowMissing(
                    f"{self.path}: images must be uint8 (0..255), not {pixels.dtype}, or {NEEDS_WINDOW}"
                )
            return pixels.astype(np.uint8, copy=False)
        try:
            return window_arrays(pixels, window)
        except ValueError as error:
            raise DataError(f"{self.path}: an image cannot be used: {error}") from error


def read_npz(path: Path, split: str, window: WindowConfig | None = None) -> ImageData:
    """Read one split of an `.npz` file, through a window: see :func:`read_stored`. Raises DataError."""
    stored = read_stored(path, split)
    return ImageData(stored.through(window), stored.labels, stored.class_names, groups=stored.groups)


def read_stored(path: Path, split: str) -> StoredArrays:
    """Read one split of an `.npz` file.

    Its keys are `images` ((N, H, W), (N, H, W, C) or (N, C, H, W); uint8, or for runs with a window any numbers),
    `labels` (whole numbers (N,), optional), `groups` (whole numbers (N,), equal for the images of one patient,
    optional) and `class_names` (strings, optional). The test split has the same keys with the prefix `test_`. The
    images of a file with the key `window` have been through that window, so it is not applied again.

    Raises:
        DataError: the file cannot be read, a key is missing or an array is not as described.
    """
    prefix = "" if split == "train" else "test_"
    if not zipfile.is_zipfile(path):
        raise DataError(f"{path} is not an .npz file, or is damaged; write it with fedssl.data.save_npz")
    try:
        check_members(path)
        with np.load(path, allow_pickle=False) as archive:
            keys = set(archive.files)
            if f"{prefix}images" not in keys:
                raise DataError(
                    f"{path} has no array {prefix}images (its arrays: {', '.join(sorted(keys)) or 'none'}); "
                    f"write it with fedssl.data.save_npz, which takes the test images too"
                )
            images = _array(archive, f"{prefix}images")
            labels = _array(archive, f"{prefix}labels") if f"{prefix}labels" in keys else None
            groups = _array(archive, f"{prefix}groups") if f"{prefix}groups" in keys else None
            names = _array(archive, "class_names").tolist() if "class_names" in keys else []
            prepared = str(_array(archive, _WINDOW)) if _WINDOW in keys else None
    except ARRAY_ERRORS as error:
        reason = textwrap.shorten(str(error) or type(error).__name__, _MAX_REASON, placeholder=" ...")
        raise DataError(f"cannot read {path}: {reason}; it must be an .npz file of plain arrays") from error
    return StoredArrays(
        path,
        _channels_first(images, path),
        _whole_numbers(labels, path),
        tuple(str(name) for name in names),
        None if prepared is None else _parsed(prepared, path),
        _group_numbers(groups, len(images), path),
    )


def shared_group(path: Path) -> str | None:
    """Return `group 7` if the arrays `groups` and `test_groups` of an `.npz` file share that number, or None.

    Returns None also if the file cannot be read: reading its images reports why.
    """
    try:
        with np.load(path, allow_pickle=False) as archive:
            if not {"groups", "test_groups"} <= set(archive.files):
                return None
            shared = np.intersect1d(_array(archive, "groups"), _array(archive, "test_groups"))
    except ARRAY_ERRORS:
        return None
    return f"group {shared[0]}" if len(shared) else None


def prepared_window(path: Path) -> WindowConfig | None:
    """Return the window through which the images of an `.npz` file have been, or None. Raises DataError.

    Returns None also if the file cannot be read: reading its images reports why.
    """
    try:
        with np.load(path, allow_pickle=False) as archive:
            return _parsed(str(_array(archive, _WINDOW)), path) if _WINDOW in archive.files else None
    except ARRAY_ERRORS:
        return None


def save_npz(path: Path, data: ImageData, test: ImageData | None = None, *, window: WindowConfig | None = None) -> None:
    """Write images, labels and class names, if there are any, for :func:`read_npz`; `test` is the test split.

    `window` is recorded as the one through which the images have been; it is needed for images of 16 bits. Raises
    DataError without it.
    """
    arrays: dict[str, NDArray[np.generic]] = {"images": data.images}
    if window is not None:
        arrays[_WINDOW] = np.array(_in_words(window))
    elif data.images.dtype != np.uint8:
        raise DataError(f"{path}: images of 16 bits are saved with the window that they have been through")
    if data.labels is not None:
        arrays["labels"] = data.labels
    if data.groups is not None:
        arrays["groups"] = data.groups
    if data.class_names:
        arrays["class_names"] = np.array(data.class_names)
    if test is not None:
        arrays["test_images"] = test.images
        if test.labels is not None:
            arrays["test_labels"] = test.labels
        if test.groups is not None:
            arrays["test_groups"] = test.groups
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:  # an open file, because np.savez would add a suffix to a name without one
        np.savez(file, allow_pickle=False, **arrays)


def _array(archive: "np.lib.npyio.NpzFile", key: str) -> NDArray[np.generic]:
    found = archive[key]
    if not isinstance(found, np.ndarray):  # numpy returns the bytes of a member that is not an array
        raise ValueError(f"its member {key} is not an array")
    return found


def _parsed(text: str, path: Path) -> WindowConfig:
    try:
        return WindowConfig.model_validate_json(text)
    except ValidationError as error:
        raise DataError(f"{path}: its `window` is not a window of data: {text[:_MAX_REASON]}") from error


def _in_words(window: WindowConfig) -> str:
    return window.model_dump_json(exclude_defaults=True)


def _channels_first(images: NDArray[np.generic], path: Path) -> NDArray[np.generic]:
    if images.dtype.kind not in "uif":
        raise DataError(f"{path}: images must be numbers, not {images.dtype}; convert them before saving")
    if 0 in images.shape[1:]:
        raise DataError(f"{path}: images of shape {images.shape} have no pixels")
    if images.ndim == 3:
        return images[:, np.newaxis]
    if images.ndim == 4:
        # 1 and 3 first: files from before there were other numbers of channels are read as they were.
        for few in ((1, 3), range(1, 17)):
            if images.shape[1] in few:
                return images
            if images.shape[3] in few:
                return np.ascontiguousarray(images.transpose(0, 3, 1, 2))
    raise DataError(
        f"{path}: images must have shape (N, H, W), (N, H, W, C) or (N, C, H, W) with 1 to 16 channels; got "
        f"{images.shape}"
    )


def _group_numbers(groups: NDArray[np.generic] | None, num_images: int, path: Path) -> NDArray[np.int64] | None:
    if groups is None:
        return None
    if groups.dtype.kind not in "iu" or groups.shape != (num_images,):
        raise DataError(f"{path}: groups must be one whole number per image; got {groups.dtype} of {groups.shape}")
    return groups.astype(np.int64)


def _whole_numbers(labels: NDArray[np.generic] | None, path: Path) -> NDArray[np.int64] | None:
    if labels is None:
        return None
    if labels.dtype.kind not in "iu":
        raise DataError(f"{path}: labels must be whole numbers, not {labels.dtype}")
    return labels.astype(np.int64)
