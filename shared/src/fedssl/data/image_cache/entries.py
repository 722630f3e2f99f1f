"""One file of a folder as the cache holds it."""

import functools
import hashlib
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from fedssl.artifacts import store
from fedssl.data.decode_file import Damaged, decode_whole, decoder_of
from fedssl.data.image_files import ImageFiles
from fedssl.data.trees import split_name
from fedssl.errors import DataError

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


@dataclass(frozen=True, slots=True)
class Entry:
    """A file of a folder, as it is in the cache.

    Attributes:
        name: its name in the listing.
        stamp: what :func:`stamp_of` returned when it was read.
        digest: sha256 of its file's content, in hexadecimal digits, and `#` with the number of its frame if the file
            may hold several; empty if it could not be read.
        why: why it cannot be decoded, or None if it can.
        height, width: of the decoded image, in pixels.
        highest: its highest value if only its upper 8 bits of 16 are used.
        constant: whether all its values are equal.
        offset: the position of its pixels in the file of pixels, in bytes.
        pixels: the digest of its pixels, as :func:`digest_of` returns it, in hexadecimal digits.
    """

    name: str
    stamp: str
    digest: str
    why: str | None = None
    height: int = 0
    width: int = 0
    highest: int | None = None
    constant: bool = False
    offset: int = 0
    pixels: str = ""

    def to_json(self) -> str:
        """Return one line of JSON. `dataclasses.asdict` would take most of the time of reading an index."""
        return json.dumps({name: getattr(self, name) for name in Entry.__slots__})


def stamp_of(files: ImageFiles, name: str) -> str:
    """Return a text that changes when the file is changed, replaced or renamed, or is decoded by another version of
    its packages. Raises OSError."""
    status = (files.tree.path / split_name(name)[0]).stat()
    return f"{status.st_size} {status.st_mtime_ns} {status.st_ctime_ns}{decoder_of(name)}"


def decode_entry(files: ImageFiles, name: str, channels: int, size: int) -> tuple[Entry, NDArray[np.generic] | None]:
    """Decode a file. Return its entry and its pixels (channels, height, width), or None if it cannot be decoded.

    A file that changes in the meantime cannot be decoded.
    """
    entry = Entry(name, "", "")
    try:
        stamp = stamp_of(files, name)
        file, frame = split_name(name)
        digest = _digest(files.tree.path / file, stamp) + ("" if frame is None else f"#{frame}")
        entry = replace(entry, stamp=stamp, digest=digest)
        pixels, highest = decode_whole(files, name, channels, size)
        if stamp_of(files, name) != stamp:
            return Entry(name, "", "", why="it changed while it was read; try again"), None
    except OSError as error:
        return Entry(name, "", "", why=f"it cannot be read: {error.strerror or type(error).__name__}"), None
    except Damaged as error:
        return replace(entry, why=error.why), None
    except DataError as error:
        return replace(entry, why=str(error)), None
    pixels = np.ascontiguousarray(pixels)
    height, width = pixels.shape[1:]
    constant = bool(pixels.min() == pixels.max())
    digest = digest_of(pixels.data).hex()
    found = replace(entry, height=height, width=width, highest=highest, constant=constant, pixels=digest)
    return found, pixels


def digest_of(pixels: "ReadableBuffer") -> bytes:
    """Return a digest of an image's pixels, of 8 bytes.

    It detects changes by a disk or a mistake, not by an attacker.
    """
    return hashlib.blake2b(pixels, digest_size=8).digest()


@functools.lru_cache(maxsize=4)
def _digest(path: Path, stamp: str) -> str:
    """Return the sha256 of a file, which has this stamp. It is kept for the other frames of the file."""
    return store.digest_of(path)
