"""The check of `fedssl doctor --data`: which images a worker would use, and which not. Imports torch."""

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from fedssl.artifacts.images import MAX_SIZE
from fedssl.cli.doctor.findings import Check, Found
from fedssl.data.contents import readable
from fedssl.data.decode_file import DecodedFile, examine
from fedssl.data.decoding import LEAST_HIGHEST, low_range
from fedssl.data.folders import list_folder
from fedssl.data.formats import read_stored
from fedssl.data.image_files import ImageFiles
from fedssl.errors import DataError
from fedssl.protocol.data import channels_in_words
from fedssl.wording import plural

NUM_SAMPLED = 200
_NUM_NAMED = 3

_REPAIR = (
    "a worker leaves out up to 1 % of the images if they cannot be decoded (--max-unreadable), and stops at more: "
    "repair them or remove them"
)
_WINDOW = (
    "a run needs [data.window] in its spec, for example percentiles = [0.5, 99.5], or values = [lowest, highest] for "
    "all images alike"
)
_UPPER_BITS = "a run without [data.window] in its spec uses only the upper 8 bits; with one it uses all"
_CONVERT = "a worker would train without these: convert them, or move them out of the folder"


def check_images(path: Path) -> Check:
    """Return what a worker could use of a folder or an .npz file: it decodes a sample of the images, and counts all."""
    try:
        if not path.is_dir():
            return _check_arrays(path)
        files = list_folder(path, "train")
    except DataError as error:
        return Check("data", Found.WRONG, str(error), "correct the folder, or give another one")
    names = _sample(files.names)
    sampled: list[DecodedFile] = []
    damaged: list[tuple[str, DataError]] = []
    for name in names:
        try:
            sampled.append(examine(files, name))
        except DataError as error:
            damaged.append((name, error))
    return _judged(path, files, sampled, damaged)


def _check_arrays(path: Path) -> Check:
    stored = read_stored(path, "train")
    num, channels, height, width = stored.pixels.shape
    kind = "8 bits" if stored.pixels.dtype == np.uint8 else str(stored.pixels.dtype)
    shape = f"{height} x {width} pixels, {channels_in_words(channels)}"
    what = f"{plural(num, 'image')} for a worker in {path}: {shape}, {kind}"
    if height != width:
        return Check("data", Found.NOTE, what, "start the worker with --image-size, which cuts squares out of them")
    if num and stored.needs_window:
        return Check("data", Found.NOTE, what, _WINDOW)
    return Check("data", Found.OK if num else Found.WRONG, what, "" if num else "put images into the file")


def _judged(
    path: Path, files: ImageFiles, sampled: Sequence[DecodedFile], damaged: Sequence[tuple[str, DataError]]
) -> Check:
    assert files.contents is not None, "the folder was searched"
    problems: list[str] = []
    todo: list[str] = []
    num_decoded = len(sampled) + len(damaged)
    if damaged:
        named = "; ".join(str(error) for _, error in damaged[:_NUM_NAMED]) + "; ..." * (len(damaged) > _NUM_NAMED)
        problems.append(f"{len(damaged):,} of {num_decoded:,} decoded images cannot be used: {named}")
        todo.append(_REPAIR)
    deep, advice = _more_than_8_bits(sampled)
    problems += deep
    if not files.contents.is_complete:
        todo.append(_CONVERT)
    left_out = files.contents.describe()
    what = "; ".join(filter(None, [_used(path, files, sampled, num_decoded), *problems, left_out]))
    if todo:
        return Check("data", Found.WRONG, what, "; ".join(todo))
    if sampled and min(sampled[0].size) > MAX_SIZE:
        advice.append(f"start the worker with --image-size, at most {MAX_SIZE}")
    return Check("data", Found.NOTE if advice else Found.OK, what, "; ".join(advice))


def _more_than_8_bits(sampled: Sequence[DecodedFile]) -> tuple[list[str], list[str]]:
    """Return what a run without a window would get wrong, and how to use the images that have more than 8 bits."""
    deep = [one for one in sampled if one.num_bits == 16 and not one.needs_window]
    highest = max((one.highest for one in deep), default=0)
    if 0 < highest < LEAST_HIGHEST:
        return [low_range(len(deep), highest)], [_WINDOW]
    if any(one.needs_window for one in sampled):
        return [], [_WINDOW]
    return [], [_UPPER_BITS] if deep else []


def _used(path: Path, files: ImageFiles, sampled: Sequence[DecodedFile], num_decoded: int) -> str:
    classes = f" in {plural(len(files.class_names), 'class', 'classes')}" if files.class_names else ", without labels"
    found = f"{plural(len(files), 'image')} for a worker in {readable(str(path))}{classes}"
    if not sampled:
        return found
    scope = "all" if num_decoded == len(files) else f"a sample of {num_decoded:,}"
    sizes = _counted(f"{one.size[0]} x {one.size[1]}" for one in sampled)
    modes = _counted(f"{one.mode} of {one.num_bits} bits" for one in sampled)
    return f"{found}; decoded {scope}: {sizes} pixels; {modes}"


def _counted(values: Iterable[str]) -> str:
    """Return the most frequent values, each with its number if there are several.

    >>> _counted(["L", "RGB", "L"])
    'L (2), RGB (1)'
    """
    counts = Counter(values)
    if len(counts) == 1:
        return next(iter(counts))
    shown = ", ".join(f"{value} ({num:,})" for value, num in counts.most_common(_NUM_NAMED))
    return shown + f" and {len(counts) - _NUM_NAMED:,} others" * (len(counts) > _NUM_NAMED)


def _sample(names: Sequence[str]) -> list[str]:
    """Return at most NUM_SAMPLED names, spread evenly."""
    step = max(1, -(-len(names) // NUM_SAMPLED))
    return list(names[::step])
