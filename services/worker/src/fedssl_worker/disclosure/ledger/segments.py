"""The ledger's files: segments named by their first entry, and the checkpoints between them."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from fedssl_worker.disclosure.ledger.chain import Point, checkpoint_text, read_checkpoint
from fedssl_worker.disclosure.ledger.entries import MAX_LINE_BYTES, LedgerEntry, LedgerError, parse_line
from fedssl_worker.disclosure.ledger.keys import SigningKey
from fedssl_worker.files import sync

_DIGITS = 12


@dataclass(frozen=True, slots=True)
class Segment:
    """One file of entries; `first_seq` is in its name."""

    path: Path
    first_seq: int


@dataclass(frozen=True, slots=True)
class TornLine:
    """A last line that a crash cut short, from byte `start` of its file on. It was never on the disk as a whole."""

    path: Path
    start: int
    content: bytes


def segments(folder: Path) -> list[Segment]:
    """Every segment, oldest first."""
    found = [Segment(path, int(path.stem)) for path in folder.glob(f"{'[0-9]' * _DIGITS}.jsonl")]
    return sorted(found, key=lambda segment: segment.first_seq)


def segment_path(folder: Path, first_seq: int) -> Path:
    """Where the segment that begins with this entry is."""
    return folder / f"{first_seq:0{_DIGITS}d}.jsonl"


def checkpoint_path(folder: Path, seq: int) -> Path:
    """Where the checkpoint after this entry is."""
    return folder / f"checkpoint-{seq:0{_DIGITS}d}.json"


def write_checkpoint(folder: Path, point: Point, key: SigningKey) -> None:
    """Put a checkpoint on the disk, whole or not at all."""
    path = checkpoint_path(folder, point.seq)
    part = path.with_name(f".{path.name}")
    with part.open("wb") as file:
        file.write(checkpoint_text(point, key))
        file.flush()
        os.fsync(file.fileno())
    part.rename(path)
    sync(folder)


def point_before(folder: Path, segment: Segment) -> Point:
    """Where the chain stands at a segment's beginning. Raises LedgerError where its checkpoint is missing."""
    if segment.first_seq == 1:
        return Point()
    point = read_checkpoint(checkpoint_path(folder, segment.first_seq - 1))
    if point.seq != segment.first_seq - 1:
        raise LedgerError(f"the checkpoint before {segment.path} is another's: it stands at entry {point.seq}")
    return point


def read_segment(path: Path, *, is_last: bool) -> Iterator[tuple[int, LedgerEntry | TornLine]]:
    """Its entries with the numbers of their lines; of the last segment a torn last line too.

    TornLine is what has no newline, and a last line that is no entry at all: a disk may keep a line's end and lose its
    middle. Raises LedgerError, with the place, at any other line that is no entry.
    """
    start = 0
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        for number, line in enumerate(iter(lambda: file.readline(MAX_LINE_BYTES), b""), start=1):
            end = start + len(line)
            try:
                if not line.endswith(b"\n"):
                    raise LedgerError("the line has no end")
                entry = parse_line(line)
            except LedgerError as error:
                if not is_last or end < size or _is_complete_object(line):
                    raise LedgerError(f"{path}, line {number}: {error}") from None
                yield number, TornLine(path, start, line)
                return
            yield number, entry
            start = end


def _is_complete_object(line: bytes) -> bool:
    """Whether it was written as a whole, and so was changed rather than cut short."""
    return line.startswith(b"{") and line.endswith(b"}\n") and b"\x00" not in line
