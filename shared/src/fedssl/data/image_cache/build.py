"""Decode a folder's images into its cache, or find them there."""

import hashlib
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import PIL
from numpy.typing import NDArray

from fedssl.cache import cache_folder
from fedssl.data.catalogue import KNOWN
from fedssl.data.contents import readable
from fedssl.data.datasets import list_files
from fedssl.data.decode_file import MOST_ASPECT, size_of
from fedssl.data.decoding import Decoded, Problems, log
from fedssl.data.folders import report_left_out
from fedssl.data.image_cache.decoders import decode_entries, num_decoders
from fedssl.data.image_cache.entries import Entry, stamp_of
from fedssl.data.image_cache.images import CachedImages
from fedssl.data.image_cache.records import LOCK, RESERVE_BYTES, Records
from fedssl.data.image_files import ImageFiles
from fedssl.data.images import ImageData
from fedssl.data.reading import Reading
from fedssl.data.trees import FolderTree
from fedssl.data.unusual import report_names
from fedssl.data.windowing import prepared_type
from fedssl.errors import DataError
from fedssl.locks import lock, try_lock
from fedssl.protocol.data import DataConfig

_VERSION = 4  # the version of the decoding and of the files
_KEPT_SETTINGS = 2  # the most caches per folder; runs of two sizes may take turns
_NUM_REPORTS = 20
_NUM_SAMPLED = 64
_NO_PIXELS = np.empty((0, 1, 1, 1), np.uint8)


@dataclass(frozen=True, slots=True)
class CachedData:
    """The images of a folder in its cache, with or without labels: what `ImageData` is for images in memory.

    Attributes:
        images: the readable images.
        digests: sha256 of each image's file.
        settings: what determines the pixels besides the files, as :func:`settings_of` returns it.
        labels: int64 class numbers (N,), or None.
        class_names: the classes by number.
        unreadable: the sorted positions, in the listing of the folder, of the files that could not be read.
        groups: int64 numbers (N,), equal for the images of one patient, or None.
    """

    images: CachedImages
    digests: tuple[str, ...]
    settings: str
    labels: NDArray[np.int64] | None = None
    class_names: tuple[str, ...] = ()
    unreadable: tuple[int, ...] = ()
    groups: NDArray[np.int64] | None = None

    def __len__(self) -> int:
        return len(self.images)

    def fingerprint(self) -> str:
        """Return the sha256 of the files' digests, the settings and the labels, in hexadecimal."""
        digest = hashlib.sha256(f"{self.settings} {self.images.image_size}\n".encode())
        digest.update("\n".join(self.digests).encode())
        if self.labels is not None:
            digest.update(self.labels.tobytes())
        return digest.hexdigest()

    def subset(self, indices: NDArray[np.int64]) -> "CachedData":
        """Return the images at `indices`, in that order. Nothing is read."""
        labels, groups = (None if each is None else each[indices] for each in (self.labels, self.groups))
        digests = tuple(self.digests[index] for index in indices)
        images = self.images.subset(indices)
        return CachedData(images, digests, self.settings, labels, self.class_names, groups=groups)

    def require(self, data: DataConfig) -> None:
        """Raise DataError unless the images were cached for these settings."""
        if (self.settings, self.images.image_size) != (settings_of(data), data.image_size):
            raise DataError("the cached images have other settings than the run: load them with the run's [data]")

    def squares(self, indices: NDArray[np.int64]) -> ImageData:
        """Return the middle squares of the images at `indices`, in the run's size."""
        labels = None if self.labels is None else self.labels[indices]
        return ImageData(self.images.squares(indices).cpu().numpy(), labels, self.class_names)


def load_cached(
    name_or_path: str,
    data: DataConfig,
    root: Path | None = None,
    *,
    max_unreadable: float | None = None,
    processes: int | None = None,
) -> CachedData:
    """Return the training images of a folder from its cache; decode those that are not there yet.

    One process at a time adds to a cache; others wait for it. What a killed process has decoded is used.

    Args:
        name_or_path: an image folder, or a known data set that is stored as a folder of image files.
        data: with a `cache_size`. The files become pixels by its window.
        root: a folder in which to search for the data set before the usual places.
        max_unreadable: the share of the files that may be unreadable, in place of the config's.
        processes: how many processes decode; None means one per processor. The result does not depend on it.

    Raises:
        DataError: the images are not files in a folder, too many cannot be decoded, or the cache cannot be written.
    """
    assert data.cache_size is not None, "only for a run with a cache"
    files = list_files(name_or_path, "train", root)
    if files is None or not isinstance(files.tree, FolderTree):
        raise DataError(
            f"data.cache_size is for folders of image files, and {name_or_path} is another kind: leave it out"
        )
    share = data.max_unreadable if max_unreadable is None else max_unreadable
    files = replace(files, reading=Reading(data.window, 0 if name_or_path in KNOWN else share))
    place = _place(files, data)
    try:
        with _locked(place):
            entries, path = _cached(place, files, data, processes)
            found = _data(files, entries, path, data)  # opens the file before another process may replace it
    except OSError as error:
        raise DataError(
            f"decoded images of {files.title} cannot be stored in {place} ({error.strerror}): make room there, or set "
            "XDG_CACHE_HOME to another folder. What is cached stays"
        ) from error
    report_left_out(files)
    return found


def _cached(place: Path, files: ImageFiles, data: DataConfig, processes: int | None) -> tuple[list[Entry], Path]:
    """Return an entry per file, in the order of the listing, and the file of their pixels."""
    assert data.cache_size is not None, "only for a run with a cache"
    with Records(place, prepared_type(data.window).itemsize, data.channels) as records:
        known = {name: entry for name in files.names if (entry := _known(records, files, name)) is not None}
        if len(known) < len(files) and records.clear_if_mostly_unused(known.values()):
            known = {}
        missing = [name for name in files.names if name not in known]
        if missing:
            _require_room(place, files, missing, data)
        workers = num_decoders(missing) if processes is None else processes
        entries, problems, reported = [], Problems(files, files.num_tolerated), 0
        with closing(decode_entries(files, missing, data.channels, data.cache_size, workers)) as found:
            for number, name in enumerate(files.names):
                entry = known[name] if name in known else records.add(*next(found))
                problems.add(_decoded(entry))
                entries.append(entry)
                if missing and number * _NUM_REPORTS >= (reported + 1) * len(files):
                    reported = number * _NUM_REPORTS // len(files)
                    log.info("caching %s: %s of %s images", files.title, f"{number:,}", f"{len(files):,}")
        problems.finish()
        return entries, records.path


def _known(records: Records, files: ImageFiles, name: str) -> Entry | None:
    try:
        return records.known(name, stamp_of(files, name))
    except OSError:
        return None  # decoding reports it


def _decoded(entry: Entry) -> Decoded:
    damaged = [] if entry.why is None else [(entry.name, entry.why)]
    return Decoded(_NO_PIXELS, damaged, int(entry.highest is not None), entry.highest or 0)


def _data(files: ImageFiles, entries: Sequence[Entry], path: Path, data: DataConfig) -> CachedData:
    unreadable = tuple(number for number, entry in enumerate(entries) if entry.why is not None)
    kept = [entry for entry in entries if entry.why is None]
    _report_unusual(files, kept)
    images = CachedImages(
        path,
        np.array([entry.offset for entry in kept], np.int64),
        np.array([(entry.height, entry.width) for entry in kept], np.int64).reshape(-1, 2),
        np.frombuffer(b"".join(bytes.fromhex(entry.pixels) for entry in kept), np.int64).copy(),
        channels=data.channels,
        image_size=data.image_size,
        dtype=prepared_type(data.window),
    )
    labels, groups = (None if each is None else np.delete(each, unreadable) for each in (files.labels, files.groups))
    digests = tuple(entry.digest for entry in kept)
    return CachedData(images, digests, settings_of(data), labels, files.class_names, unreadable, groups)


def _report_unusual(files: ImageFiles, kept: Sequence[Entry]) -> None:
    """Log the images of one value, and the files with equal content."""
    first: dict[str, str] = {}
    constant = [readable(entry.name) for entry in kept if entry.constant]
    duplicates = [
        f"{readable(entry.name)} = {readable(earlier)}"
        for entry in kept
        if (earlier := first.setdefault(entry.digest, entry.name)) is not entry.name and not entry.constant
    ]
    report_names(files, constant, duplicates)


def settings_of(data: DataConfig) -> str:
    """Return what determines cached pixels besides the files' content."""
    window = None if data.window is None else data.window.model_dump_json()
    return f"{_VERSION} {PIL.__version__} {data.channels} {data.cache_size} {window}"


def _place(files: ImageFiles, data: DataConfig) -> Path:
    settings = settings_of(data)
    folder = hashlib.sha256(os.fsencode(files.tree.path.resolve())).hexdigest()[:16]
    return cache_folder() / "images" / folder / hashlib.sha256(settings.encode()).hexdigest()[:16]


@contextmanager
def _locked(place: Path) -> Iterator[None]:
    """Hold the lock on a cache; the kernel releases it if this process dies."""
    while True:
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
        place.parent.chmod(0o700)
        with (place / LOCK).open("wb") as file:
            if not try_lock(file):
                log.info("another process is caching the same images: waiting for it")
                lock(file)
            if not _is_same(place / LOCK, file.fileno()):
                continue  # removed in the meantime, as one of several caches of the folder
            _remove_others(place)
            yield
            return


def _is_same(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _remove_others(place: Path) -> None:
    """Remove the caches of the same folder with other settings, except the last ones that were used."""
    others = sorted((each for each in place.parent.iterdir() if each != place), key=_used_at, reverse=True)
    (place / LOCK).touch()
    for other in others[_KEPT_SETTINGS - 1 :]:
        with suppress(OSError), (other / LOCK).open("ab") as file:  # another process may have removed it
            if try_lock(file):
                shutil.rmtree(other, ignore_errors=True)


def _used_at(place: Path) -> float:
    try:
        return (place / LOCK).stat().st_mtime
    except OSError:
        return 0


def _require_room(place: Path, files: ImageFiles, missing: Sequence[str], data: DataConfig) -> None:
    """Log how much disk space caching takes. Raises DataError if the disk has less."""
    needed = expected_bytes(files, missing, data)
    free = shutil.disk_usage(place).free
    log.info(
        "caching %s images of %s: about %s MB in %s, which has %s MB left",
        f"{len(missing):,}", files.title, f"{needed / 1e6:,.0f}", place, f"{free / 1e6:,.0f}",
    )  # fmt: skip
    if needed + RESERVE_BYTES > free:
        raise DataError(
            f"the cached images of {files.title} take about {needed / 1e9:,.1f} GB, and {place} has "
            f"{free / 1e9:,.1f} GB left: make room there, set XDG_CACHE_HOME to another folder, or take a smaller "
            "data.cache_size"
        )


def expected_bytes(files: ImageFiles, names: Sequence[str], data: DataConfig) -> int:
    """Estimate how many bytes some files take in a cache, from the shapes of a sample of them."""
    assert data.cache_size is not None, "only for a run with a cache"
    if not names:
        return 0
    sample = (names[number * len(names) // _NUM_SAMPLED] for number in range(_NUM_SAMPLED))
    aspects = []
    for name in dict.fromkeys(sample):
        try:
            shorter, longer = sorted(size_of(files, name))
        except DataError:
            continue  # not an image of PIL, or damaged
        aspects.append(min(MOST_ASPECT, longer / max(1, shorter)))
    aspect = sum(aspects) / len(aspects) if aspects else MOST_ASPECT
    return round(len(names) * aspect * data.cache_size**2 * data.channels * prepared_type(data.window).itemsize)
