"""The ledger's files: segments named after their first entry, and the checkpoints between them."""

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from fedssl.files import write_atomically
from fedssl_worker.disclosure.ledger.chain import Point, checkpoint_text, read_checkpoint
from fedssl_worker.disclosure.ledger.entries import MAX_LINE_BYTES, LedgerEntry, LedgerError, parse_line
from fedssl_worker.disclosure.ledger.keys import SigningKey

_DIGITS = 12
_HEAD = "head"
_HEAD_LINE = re.compile(rb"([0-9]{12}) ([0-9a-f]{64})\n")


@dataclass(frozen=True, slots=True)
class Segment:
    """One file of entries; `first_seq` is in its name."""

    path: Path
    first_seq: int


@dataclass(frozen=True, slots=True)
class TornLine:
    """A last line that a crash cut short, from byte `start` of its file. It was never completely on the disk."""

    path: Path
    start: int
    content: bytes


def segments(folder: Path) -> list[Segment]:
    """Return every segment, oldest first."""
    found = [Segment(path, int(path.stem)) for path in folder.glob(f"{'[0-9]' * _DIGITS}.jsonl")]
    return sorted(found, key=lambda segment: segment.first_seq)


def segment_path(folder: Path, first_seq: int) -> Path:
    """Return the path of the segment that begins with this entry."""
    return folder / f"{first_seq:0{_DIGITS}d}.jsonl"


def checkpoints(folder: Path) -> list[Path]:
    """Return the path of every checkpoint, oldest first."""
    return sorted(folder.glob(f"checkpoint-{'[0-9]' * _DIGITS}.json"))


def checkpoint_path(folder: Path, seq: int) -> Path:
    """Return the path of the checkpoint after this entry."""
    return folder / f"checkpoint-{seq:0{_DIGITS}d}.json"


def write_checkpoint(folder: Path, point: Point, key: SigningKey) -> None:
    """Write a checkpoint of this point."""
    write_atomically(checkpoint_path(folder, point.seq), checkpoint_text(point, key))


def write_head(folder: Path, seq: int, entry_hash: str) -> None:
    """Record which entry is the newest, once it is on the disk.

    The file is overwritten in place and not synced: a crash leaves this entry or an earlier one, never a later one.
    """
    file = os.open(folder / _HEAD, os.O_WRONLY | os.O_CREAT, 0o600)
    try:
        os.pwrite(file, f"{seq:0{_DIGITS}d} {entry_hash}\n".encode(), 0)
    finally:
        os.close(file)


def read_head(folder: Path) -> tuple[int, str] | None:
    """Return the number and the hash of the newest entry, or None if no entry has been recorded.

    Ledgers of earlier versions have no such file, and a loss of power may leave it empty.
    """
    try:
        found = _HEAD_LINE.fullmatch((folder / _HEAD).read_bytes())
    except FileNotFoundError:
        return None
    return None if found is None else (int(found[1]), found[2].decode())


def point_before(folder: Path, segment: Segment) -> Point:
    """Return the chain's point before a segment. Raises LedgerError if the segment's checkpoint is missing."""
    if segment.first_seq == 1:
        return Point()
    point = read_checkpoint(checkpoint_path(folder, segment.first_seq - 1))
    if point.seq != segment.first_seq - 1:
        raise LedgerError(f"the checkpoint before {segment.path} is for another segment: it is of entry {point.seq}")
    return point


def read_segment(path: Path, *, is_last: bool) -> Iterator[tuple[int, LedgerEntry | TornLine]]:
    """Yield every entry with the number of its line and, in the last segment, a torn last line.

    A last line is torn if it lacks its newline or is not an entry at all: a disk may keep a line's end and lose its
    middle. Raises LedgerError, with the place, at any other line that is not an entry.
    """
    start = 0
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        for number, line in enumerate(iter(lambda: file.readline(MAX_LINE_BYTES), b""), start=1):
            end = start + len(line)
            try:
                if not line.endswith(b"\n"):
                    raise LedgerError("the line is incomplete")
                entry = parse_line(line)
            except LedgerError as error:
                if not is_last or end < size or is_complete_object(line):
                    raise LedgerError(f"{path}, line {number}: {error}") from None
                yield number, TornLine(path, start, line)
                return
            yield number, entry
            start = end


def is_complete_object(line: bytes) -> bool:
    """Return whether a line was written completely, and so was changed rather than cut short."""
    return line.startswith(b"{") and line.endswith(b"}\n") and b"\x00" not in line
