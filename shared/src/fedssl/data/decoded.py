"""Decoded images of public data sets, kept as memory maps so that the second start is quick and memory stays bounded.

Each set of images is in `decoded/<key>/` below the cache folder, as `images.npy` ((N, C, H, W)) with a
description in `about.json`. The key is a sha256 over the files' names and contents (checksums in an archive, size and
time of change in a folder), the shape, and the decoders. A change of the pixels therefore changes the key, so nothing
here is ever out of date, and everything can be removed at any time.
"""

import hashlib
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import PIL

from fedssl.cache import cache_folder
from fedssl.data.decode_file import decoder_of
from fedssl.data.decoding import decode_chunks, log
from fedssl.data.image_files import ImageFiles
from fedssl.data.windowing import Pixels, prepared_type
from fedssl.errors import DataError
from fedssl.locks import lock, try_lock

_VERSION = 3  # the version of the decoding
_IMAGES, _ABOUT = "images.npy", "about.json"


def decoded(files: ImageFiles, channels: int, size: int) -> Pixels:
    """Return all images, (N, channels, size, size), read-only and memory-mapped; decode them if necessary.

    One process decodes; other processes that need the same images wait for it. What a killed process has written is not
    used: the next process starts again. Images are read from the cache folder only if they are complete.

    Raises:
        DataError: an image cannot be decoded, or the decoded images cannot be stored.
    """
    shape = (len(files), channels, size, size)
    dtype = prepared_type(files.reading.window)
    place = cache_folder() / "decoded" / _key(files, channels, size)
    images = _kept(place, shape, dtype)
    if images is not None:
        return images
    try:
        with _locked(place):
            images = _kept(place, shape, dtype)  # another process may have decoded them in the meantime
            if images is None:
                _decode_into(place, files, shape)
                images = _kept(place, shape, dtype)
    except OSError as error:
        raise DataError(
            f"decoded images of {files.title} cannot be stored in {place.parent} ({error.strerror}): "
            "make room there, or set XDG_CACHE_HOME to another folder"
        ) from error
    if images is None:
        raise DataError(f"{place} was damaged while it was written: remove it and try again")
    return images


def _key(files: ImageFiles, channels: int, size: int) -> str:
    digest = hashlib.sha256(f"{_VERSION}\n{PIL.__version__}\n{channels}\n{size}\n".encode())
    if files.reading.window is not None:
        digest.update(f"window {files.reading.window.model_dump_json()}\n".encode())
    for name in files.names:
        digest.update(f"{name}\n{files.tree.stamp(name)}{decoder_of(name)}\n".encode())
    return digest.hexdigest()[:32]


def _kept(place: Path, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Pixels | None:
    """Return the images in a folder of the cache, or None if they are missing or damaged."""
    try:
        images = np.load(place / _IMAGES, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError):
        return None
    return images if images.dtype == dtype and images.shape == shape else None


@contextmanager
def _locked(place: Path) -> Iterator[None]:
    """Hold the lock on a folder of the cache; the kernel releases it if this process dies."""
    place.parent.mkdir(parents=True, exist_ok=True)
    with place.with_suffix(".lock").open("wb") as file:
        if not try_lock(file):
            log.info("another process is decoding the same images: waiting for it")
            lock(file)
        yield


def _decode_into(place: Path, files: ImageFiles, shape: tuple[int, int, int, int]) -> None:
    """Write the images to a temporary folder next to their place, and then rename it, so that they appear complete."""
    dtype = prepared_type(files.reading.window)
    num_bytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    free = shutil.disk_usage(place.parent).free
    if num_bytes > free:
        raise DataError(
            f"the decoded images of {files.title} take {num_bytes / 1e9:.1f} GB and {place.parent} has "
            f"{free / 1e9:.1f} GB left: make room there, or set XDG_CACHE_HOME to another folder"
        )
    log.info("decoding %s images of %s once; they are stored in %s", f"{len(files):,}", files.title, place)
    partial = place.with_suffix(".partial")
    shutil.rmtree(partial, ignore_errors=True)  # left by a process that was killed
    partial.mkdir()
    try:
        # Written, not mapped, so that a full disk raises an error and does not kill the process.
        with (partial / _IMAGES).open("wb") as file:
            np.lib.format.write_array_header_1_0(file, {"descr": dtype.str, "fortran_order": False, "shape": shape})
            for chunk in decode_chunks(files, *shape[1:3]):
                file.write(chunk.data)
        about = {"images": files.title, "from": str(files.tree.path), "shape": shape, "decoder": PIL.__version__}
        (partial / _ABOUT).write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")
        shutil.rmtree(place, ignore_errors=True)  # damaged, otherwise it would have been read
        partial.rename(place)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
