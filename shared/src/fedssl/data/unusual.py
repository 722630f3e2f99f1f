"""Report images that are probably mistakes of an archive, although they can be read."""

import hashlib
from collections.abc import Sequence

import numpy as np

from fedssl.data.contents import readable
from fedssl.data.decoding import log
from fedssl.data.image_files import ImageFiles
from fedssl.data.windowing import Pixels

_SHOWN = 10


def report_unusual(files: ImageFiles, pixels: Pixels, unreadable: Sequence[int]) -> None:
    """Log the images of one value, and those that equal an earlier one, after they were scaled.

    Args:
        files: the listing.
        pixels: (N, C, S, S), without those at the positions `unreadable` of the listing.
    """
    names = [files.names[position] for position in np.delete(np.arange(len(files)), list(unreadable))]
    first: dict[bytes, str] = {}
    constant: list[str] = []
    duplicates: list[str] = []
    for name, image in zip(names, pixels, strict=True):
        if image.min() == image.max():
            constant.append(readable(name))
            continue
        digest = hashlib.blake2b(image.data, digest_size=16).digest()
        if (earlier := first.setdefault(digest, name)) is not name:
            duplicates.append(f"{readable(name)} = {readable(earlier)}")
    report_names(files, constant, duplicates)


def report_names(files: ImageFiles, constant: list[str], duplicates: list[str]) -> None:
    """Log the names of images of one value, and those of images that equal an earlier one."""
    if constant:
        log.warning("%s: images of only one value: %s (%s)", files.title, f"{len(constant):,}", _listed(constant))
    if duplicates:
        log.warning(
            "%s: images that equal an earlier one: %s (%s)", files.title, f"{len(duplicates):,}", _listed(duplicates)
        )


def _listed(found: list[str]) -> str:
    return ", ".join(found[:_SHOWN]) + ", ..." * (len(found) > _SHOWN)
