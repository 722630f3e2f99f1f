"""Writes the ledger: appends, syncs, rotates, and recovers after a crash."""

import hashlib
import os
import secrets
import threading
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fedssl.artifacts.store import digest_of
from fedssl.files import sync
from fedssl.protocol.ledger import LedgerAnchor
from fedssl_worker.disclosure.ledger.chain import Point
from fedssl_worker.disclosure.ledger.entries import Kind, LedgerEntry, LedgerError, entry_hash
from fedssl_worker.disclosure.ledger.keys import make_key, read_key
from fedssl_worker.disclosure.ledger.segments import (
    TornLine,
    checkpoints,
    point_before,
    read_head,
    read_segment,
    segment_path,
    segments,
    write_checkpoint,
    write_head,
)
from fedssl_worker.disclosure.ledger.totals import Totals
from fedssl_worker.disclosure.policy import NO_POLICY, LedgerRules

EARLIER_FILE = "ledger.jsonl"
"""A file that earlier versions wrote next to the folder: plain lines without a chain. It is never changed."""

# Entries that need no anchor of their own. `sent` follows an `intent`, which does.
_NEEDS_NO_ANCHOR = ("sent", "receipt", "rotated")
_MAX_TEXT_LENGTH = 1000


class Ledger:
    """A ledger that is open for appending. Threads may share it; processes may not."""

    def __init__(self, folder: Path, *, policy: str = NO_POLICY, rules: LedgerRules | None = None) -> None:
        """Open the ledger, or begin one. Raises LedgerError if its newest segment was changed."""
        self._folder = folder
        self._policy = policy
        self._rules = rules or LedgerRules()
        self._lock = threading.RLock()
        self._file: int | None = None
        self._point = Point()
        self._length = 0
        self._anchored = self._newest_informative = 0
        self._newest_written = 0
        self._written_policy: str | None = None
        self._totals: Totals | None = None
        with self._lock:
            self._open()

    @property
    def key(self) -> str:
        """The ledger's public key, in hexadecimal."""
        return self._key.public

    @property
    def anchor(self) -> LedgerAnchor:
        """The anchor of the newest entry."""
        with self._lock:
            return LedgerAnchor(key=self._key.public, seq=self._point.seq, head=self._point.head)

    @property
    def is_anchored(self) -> bool:
        """True if receipts of the coordinator cover every entry that needs an anchor."""
        with self._lock:
            return self._newest_informative <= self._anchored

    def totals(self) -> Totals:
        """Return what has left in all runs, from every segment. Only the first call reads them. Raises LedgerError."""
        with self._lock:
            if self._totals is None:
                found, totals = segments(self._folder), Totals()
                for segment in found:
                    for _, line in read_segment(segment.path, is_last=segment == found[-1]):
                        if isinstance(line, LedgerEntry):
                            totals.count(line)
                self._totals = totals
            return self._totals

    def change_policy(self, policy: str, rules: LedgerRules) -> None:
        """Record that another policy is in force from now on."""
        with self._lock:
            self._policy, self._rules = policy, rules
            self.append("policy", signed=_yes_or_no(rules.sign))

    def require_open(self) -> None:
        """Open the ledger again if it was closed because a write failed. Raises LedgerError."""
        with self._lock:
            if self._file is None:
                self._open()

    def append(self, kind: Kind, **fields: Any) -> LedgerEntry:
        """Add an entry and wait until it is on the disk. Raises LedgerError if it cannot be written.

        A failed write leaves at most a torn line, which the next write removes first.
        """
        with self._lock:
            self.require_open()
            if self._length >= self._rules.segment_entries:
                self._rotate()
            return self._write(kind, fields)

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            if self._file is not None:
                os.close(self._file)
                self._file = None

    def _write(self, kind: Kind, fields: dict[str, Any]) -> LedgerEntry:
        assert self._file is not None, "opened by the caller"
        body = {
            "kind": kind,
            "policy": self._policy,
            "salt": secrets.token_hex(16),  # without a salt, an anchored hash would confirm a guess of the entry
            "seq": self._point.seq + 1,
            "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
            **{name: _storable(value) for name, value in fields.items()},
        }
        hashed = entry_hash(self._point.head, body)
        signature = self._key.sign(bytes.fromhex(hashed)) if self._point.wants_signature(kind) else ""
        entry = LedgerEntry(body, hashed, self._point.head, signature)
        try:
            _write_all(self._file, entry.line())
            os.fsync(self._file)
            write_head(self._folder, entry.seq, entry.hash)
        except OSError as error:
            self.close()
            raise LedgerError(f"cannot write the ledger in {self._folder}: {error.strerror}; nothing leaves") from error
        self._advance(entry, self._point.extended(entry))
        return entry

    def _advance(self, entry: LedgerEntry, point: Point) -> None:
        """Remember that an entry is on the disk and that the chain ends at `point`."""
        self._point = point
        self._newest_written = max(self._newest_written, entry.seq)
        if self._totals is not None:
            self._totals.count(entry)
        self._written_policy = entry.body.get("policy")
        self._length += 1
        if entry.kind == "receipt":
            self._anchored = max(self._anchored, int(entry.body["anchored_seq"]))
        if entry.kind not in _NEEDS_NO_ANCHOR:
            self._newest_informative = entry.seq

    def _open(self) -> None:
        try:
            self._open_or_begin()
        except OSError as error:
            self.close()
            raise LedgerError(f"cannot use the ledger in {self._folder}: {error.strerror}") from error

    def _open_or_begin(self) -> None:
        if self._newest_written and not segments(self._folder):
            raise LedgerError(
                f"the ledger in {self._folder} has disappeared after entry {self._newest_written}: mount its disk "
                "again, or restore it"
            )
        self._folder.mkdir(mode=0o700, exist_ok=True)
        key = self._folder / "key"
        if segments(self._folder):
            self._key = read_key(key)
        elif checkpoints(self._folder) or read_head(self._folder) is not None:
            raise LedgerError(f"the newest segment of the ledger in {self._folder} is missing: restore it")
        else:
            self._key = read_key(key) if key.exists() else make_key(key)
            os.close(self._start_segment())
            sync(self._folder.parent)
        self._resume()

    def _resume(self) -> None:
        """Read the newest segment to its end. Remove and record a last line that a crash has cut short."""
        last = segments(self._folder)[-1]
        self._point, self._length = point_before(self._folder, last), 0
        torn: TornLine | None = None
        for number, line in read_segment(last.path, is_last=True):
            if isinstance(line, TornLine):
                torn = line
                break
            try:
                self._advance(line, self._point.after(line))
            except LedgerError as error:
                raise LedgerError(
                    f"{last.path}, line {number}: {error}. The worker does not continue this ledger: move "
                    f"{self._folder} elsewhere as evidence, and start again"
                ) from None
        if self._point.key not in ("", self._key.public):
            raise LedgerError(f"{self._folder / 'key'} is not the key of this ledger: restore the key")
        head = read_head(self._folder)
        newest = max(self._newest_written, 0 if head is None else head[0])
        if newest > self._point.seq:
            raise LedgerError(
                f"the ledger in {self._folder} ends with entry {self._point.seq}, and entry {newest} had been "
                f"written: its end was cut off. The worker does not continue this ledger: restore {last.path}, or move "
                f"{self._folder} elsewhere as evidence, and start again"
            )
        self._file = os.open(last.path, os.O_WRONLY | os.O_APPEND)
        if torn is not None:
            os.ftruncate(self._file, torn.start)
            os.fsync(self._file)
        if self._point.seq == 0:
            self._write("opened", self._opening())
        elif self._written_policy != self._policy:
            self._write("policy", {"signed": _yes_or_no(self._rules.sign)})
        if torn is not None:
            digest = hashlib.sha256(torn.content).hexdigest()
            self._write("recovered", {"bytes": len(torn.content), "digest": digest})

    def _opening(self) -> dict[str, Any]:
        fields: dict[str, Any] = {"key": self._key.public, "signed": _yes_or_no(self._rules.sign)}
        earlier = self._folder.parent / EARLIER_FILE
        if earlier.is_file():
            fields |= {
                "earlier_file": EARLIER_FILE,
                "earlier_bytes": earlier.stat().st_size,
                "earlier_digest": digest_of(earlier),
            }
        return fields

    def _rotate(self) -> None:
        length, totals = self._length, self._known_totals()
        try:
            write_checkpoint(self._folder, self._point, self._key)
            self.close()
            self._file = self._start_segment()
        except OSError as error:
            self.close()
            raise LedgerError(f"cannot begin a new segment of the ledger: {error.strerror}; nothing leaves") from error
        self._length = 0
        self._write("rotated", {"entries": length, **totals})

    def _known_totals(self) -> dict[str, int]:
        """Return the totals for the first entry of the next segment, unless they cannot be counted any more."""
        try:
            totals = self.totals()
        except LedgerError:
            return {}  # an old segment was damaged: `verify` reports that, and it must not stop the ledger
        if not totals.is_known:
            return {}
        evaluations = {"evaluations_total": totals.num_evaluations} if totals.knows_evaluations else {}
        return {"rounds_total": totals.num_rounds, "bytes_total": totals.num_bytes, **evaluations}

    def _start_segment(self) -> int:
        path = segment_path(self._folder, self._point.seq + 1)
        file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        sync(self._folder)
        return file


def _write_all(file: int, content: bytes) -> None:
    while content:
        content = content[os.write(file, content) :]


def _storable(value: Any) -> Any:
    """Return a text from outside as valid UTF-8 of a limited length, and any other value unchanged."""
    if isinstance(value, str):
        return value[:_MAX_TEXT_LENGTH].encode("utf-8", "backslashreplace").decode()
    return value


def _yes_or_no(value: bool) -> str:  # noqa: FBT001 - the canonical form has no truth values
    return "yes" if value else "no"
