"""The folder of a file of representations that is not complete yet, from which an interrupted command continues.

It holds what identifies the file (`about.json`), the representations so far (`rows`, float32) and a line of JSON per
batch (`batches.jsonl`), which is written after the batch's rows: a batch without a line is computed again.
"""

import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from fedssl.embeddings.identity import difference
from fedssl.embeddings.index_file import Float32
from fedssl.embeddings.outcome import Done
from fedssl.errors import ResultsError
from fedssl.locks import FolderLock
from fedssl.run_files import read_json, write_json

_ABOUT, _ROWS, _BATCHES, _LOCK = "about.json", "rows", "batches.jsonl", ".lock"


def partial_folder(destination: Path) -> Path:
    """Return the folder of the incomplete file."""
    return destination.with_name(f"{destination.name}.partial")


class HalfMade:
    """The folder next to `destination`. One process uses it at a time.

    Raises :class:`~fedssl.errors.FolderInUseError` if another process does.
    """

    def __init__(self, destination: Path) -> None:
        self.folder = partial_folder(destination)
        self.batches: list[Done] = []
        self.about: dict[str, Any] = {}
        self.width = 0
        self._lock = FolderLock(self.folder, _LOCK)
        self._lock.acquire()

    def __enter__(self) -> "HalfMade":
        return self

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def start(self, about: dict[str, Any], width: int) -> None:
        """Continue the work of an earlier process, if there is any. Raises ResultsError if its identity differs."""
        found = read_json(self.folder / _ABOUT) if self._has_batches() else None
        if found is None:
            for name in (_ROWS, _BATCHES):
                (self.folder / name).unlink(missing_ok=True)
            write_json(self.folder / _ABOUT, about)
        elif different := difference(found, about) or _other_decoders(found, about):
            raise ResultsError(
                f"{self.folder} holds the beginning of a file of {different}: remove the folder to start from "
                "scratch, or choose another --out"
            )
        self.about, self.width = about | (found or {}), width
        self._read_batches()

    def append(self, rows: Float32, done: Done) -> None:
        """Store a batch."""
        with (self.folder / _ROWS).open("ab") as file:
            file.write(rows.astype("<f4", copy=False).tobytes())
            file.flush()
            os.fsync(file.fileno())
        with (self.folder / _BATCHES).open("a", encoding="utf-8") as lines:
            lines.write(json.dumps(asdict(done)) + "\n")
        self.batches.append(done)

    def rows(self, num_at_once: int) -> Iterator[Float32]:
        """Yield the representations, `num_at_once` at a time."""
        with (self.folder / _ROWS).open("rb") as file:
            while part := file.read(4 * self.width * num_at_once):
                yield np.frombuffer(part, "<f4").reshape(-1, self.width)

    def remove(self) -> None:
        """Remove the folder, because the file is complete."""
        shutil.rmtree(self.folder)

    def _has_batches(self) -> bool:
        lines = self.folder / _BATCHES
        return lines.exists() and lines.stat().st_size > 0

    def _read_batches(self) -> None:
        """Read the lines of the batches whose rows are there, and cut off what follows them."""
        rows, lines = self.folder / _ROWS, self.folder / _BATCHES
        rows.touch()
        lines.touch()
        size, num_rows, num_bytes = rows.stat().st_size, 0, 0
        with lines.open("rb") as file:
            for line in file:
                done = _parse(line)
                if done is None or 4 * self.width * (num_rows + done.num) > size:
                    break
                self.batches.append(done)
                num_rows, num_bytes = num_rows + done.num, num_bytes + len(line)
        os.truncate(lines, num_bytes)
        os.truncate(rows, 4 * self.width * num_rows)


def _other_decoders(found: dict[str, Any], wanted: dict[str, Any]) -> str:
    """Return in words that other versions of packages decoded the images of `found`; else an empty text."""
    if found.get("decoders", []) == wanted["decoders"]:  # until 27 November 2026, they were not stored
        return ""
    before, now = ("; ".join(about.get("decoders", ["an unknown version"])) for about in (found, wanted))
    return f"images that were decoded by {before}, not by {now}"


def _parse(line: bytes) -> Done | None:
    try:
        values = json.loads(line if line.endswith(b"\n") else b"")
        damaged = [(int(position), str(why)) for position, why in values["damaged"]]
        return Done(int(values["num"]), damaged, int(values["num_deep"]), int(values["highest"]))
    except (ValueError, KeyError, TypeError):
        return None
