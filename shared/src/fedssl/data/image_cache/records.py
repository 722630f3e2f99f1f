"""The cache's two files: `pixels.bin`, to which decoded images are appended, and `index.jsonl`, with a line per file.

A line is written after its pixels are on the disk, so a process that is killed loses only the images of the last
seconds, and everything in the index is complete. A thread waits for the disk while further images are decoded.
"""

import json
import os
import shutil
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Self

import numpy as np
from numpy.typing import NDArray

from fedssl.data.image_cache.entries import Entry
from fedssl.data.trees import split_name
from fedssl.errors import DataError

PIXELS, INDEX, LOCK = "pixels.bin", "index.jsonl", "lock"
_FLUSH_BYTES, _FLUSH_SECONDS = 64 << 20, 2.0
RESERVE_BYTES = 256 << 20
"""The space that caching leaves on the disk for everything else on this machine."""
_MOST_UNUSED_BYTES = 256 << 20


class Records:
    """The entries and pixels of a cache that this process may write, because it holds the lock.

    Use it in a `with` block. What was appended is in the index when the block has ended, even if by an error.
    """

    def __init__(self, place: Path, itemsize: int, channels: int) -> None:
        self.path = place / PIXELS
        self._index_path = place / INDEX
        self._bytes_per_pixel = itemsize * channels
        self._by_name: dict[str, Entry] = {}
        self._by_content: dict[str, Entry] = {}
        self._waiting: list[Entry] = []  # entries whose pixels are written, and not yet flushed
        self._end = self._unflushed = 0
        self._flushed_at = time.monotonic()
        self._thread = ThreadPoolExecutor(1)
        self._flushing: Future[None] | None = None

    def __enter__(self) -> Self:
        length, is_damaged = self._read_index()
        size = self.path.stat().st_size if self.path.exists() else 0
        if is_damaged or self._end > size or (size and not self._end):
            # Other processes may read the file at places that this index no longer names: they keep it, as it is.
            self.path.unlink(missing_ok=True)
            self._by_name, self._by_content, self._end, length = {}, {}, 0, 0
        self._pixels = self.path.open("ab")
        self.path.chmod(0o600)
        self._pixels.truncate(self._end)
        self._pixels.seek(self._end)
        self._index_path.touch(mode=0o600)
        self._index = self._index_path.open("r+b")
        self._index.truncate(length)  # a line that was cut short
        self._index.seek(length)
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._flush()
            self._finish_flush()
        finally:
            self._thread.shutdown()
            self._pixels.close()
            self._index.close()

    def known(self, name: str, stamp: str) -> Entry | None:
        """Return the entry of a file, if the file has not changed since it was decoded."""
        entry = self._by_name.get(name)
        return entry if entry is not None and entry.stamp == stamp and entry.why is None else None

    def add(self, entry: Entry, pixels: NDArray[np.generic] | None) -> Entry:
        """Append a decoded file. Return its entry, with the place of its pixels.

        A file that cannot be decoded is not recorded: with another package, or more memory, it may be decoded later.
        Raises OSError, and DataError if the disk is nearly full.
        """
        if entry.why is not None:
            return entry
        same = self._by_content.get(_content(entry))
        if same is not None and same.why is None:  # the same content under another name or time
            entry = replace(entry, offset=same.offset, pixels=same.pixels)
        elif pixels is not None:
            entry = replace(entry, offset=self._end)
            self._pixels.write(pixels.data)
            self._end += pixels.nbytes
            self._unflushed += pixels.nbytes
        self._waiting.append(entry)
        self._know(entry)
        if self._unflushed >= _FLUSH_BYTES or time.monotonic() - self._flushed_at >= _FLUSH_SECONDS:
            self._flush()
            self._require_room()
        return entry

    def unused_bytes(self, used: Iterable[Entry]) -> int:
        """Return how many bytes of pixels belong to none of these entries."""
        return self._end - sum({entry.offset: self._num_bytes(entry) for entry in used if entry.why is None}.values())

    def clear_if_mostly_unused(self, used: Iterable[Entry]) -> bool:
        """Remove everything if most of it belongs to files that were changed or removed.

        Return whether it was removed.
        """
        unused = self.unused_bytes(used)
        if unused <= max(_MOST_UNUSED_BYTES, self._end // 2):
            return False
        self._index.truncate(0)
        self._index.seek(0)
        self.path.unlink()  # a process that reads it keeps the file until it closes it
        self._pixels.close()
        self._pixels = self.path.open("ab")
        self.path.chmod(0o600)
        self._by_name, self._by_content, self._end = {}, {}, 0
        return True

    def _flush(self) -> None:
        """Begin to write what is waiting, after the previous write has ended. Raises OSError if that has failed."""
        self._finish_flush()
        self._flushed_at, self._unflushed = time.monotonic(), 0
        if self._waiting:
            self._pixels.flush()
            self._flushing = self._thread.submit(self._write, self._waiting)
            self._waiting = []

    def _finish_flush(self) -> None:
        if self._flushing is not None:
            flushing, self._flushing = self._flushing, None
            flushing.result()

    def _write(self, entries: Sequence[Entry]) -> None:
        os.fdatasync(self._pixels.fileno())
        self._index.write("".join(map(_line, entries)).encode())
        self._index.flush()

    def _require_room(self) -> None:
        free = shutil.disk_usage(self.path.parent).free
        if free < RESERVE_BYTES:
            raise DataError(
                f"the disk of {self.path.parent} has {free / 1e6:,.0f} MB left, and caching images stops at "
                f"{RESERVE_BYTES / 1e6:,.0f}: make room, or set XDG_CACHE_HOME to another folder. What is cached stays"
            )

    def _read_index(self) -> tuple[int, bool]:
        """Read the entries up to the first damaged line.

        Return their length in bytes, and whether more than an unfinished last line is damaged.
        """
        length = 0
        try:
            with self._index_path.open("rb") as lines:  # line by line: all of them take as much memory as the entries
                for line in lines:
                    if (entry := _entry(line)) is None:
                        return length, line.endswith(b"\n")
                    self._know(entry)
                    self._end = max(self._end, entry.offset + self._num_bytes(entry))
                    length += len(line)
        except FileNotFoundError:
            pass
        return length, False

    def _num_bytes(self, entry: Entry) -> int:
        return 0 if entry.why is not None else entry.height * entry.width * self._bytes_per_pixel

    def _know(self, entry: Entry) -> None:
        self._by_name[entry.name] = entry
        self._by_content.setdefault(_content(entry), entry)


def _line(entry: Entry) -> str:
    return f"{entry.to_json()}\n"


def _entry(line: bytes) -> Entry | None:
    """Return the entry of a line, or None if the line is damaged."""
    try:
        entry = Entry(**json.loads(line))
    except (ValueError, TypeError):
        return None
    return entry if line == _line(entry).encode() else None


def _content(entry: Entry) -> str:
    """Return what determines the pixels: the content, and the suffix, by which arrays are recognised."""
    return entry.digest + os.path.splitext(split_name(entry.name)[0])[1].lower()
