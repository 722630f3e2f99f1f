"""Reads a ledger once, verifies it on the way, and follows what a running worker adds. Writes nothing."""

import sys
import threading
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedssl_worker.disclosure.ledger.chain import Point
from fedssl_worker.disclosure.ledger.entries import MAX_LINE_BYTES, LedgerEntry, LedgerError, parse_line
from fedssl_worker.disclosure.ledger.segments import Segment, is_complete_object, point_before, read_head, segments
from fedssl_worker.disclosure.ledger.totals import Totals

FOLLOW_SECONDS = 2.0
_BATCH = 500
"""Entries per hold of the lock, so that a request does not wait for a long ledger."""

OUTCOMES = ("sent", "unconfirmed", "refused")


@dataclass(slots=True)
class Row:
    """An artifact that left or was refused. Its tensors are only counted: a model has hundreds of names."""

    seq: int
    time: str
    run: str
    round_number: int | None
    method: str
    outcome: str
    what: str
    num_bytes: int | None
    digest: str
    policy: str


@dataclass(slots=True)
class RunTotals:
    """The rounds and bytes of one run."""

    method: str = ""
    rounds: set[int] = field(default_factory=set)
    digests: set[tuple[int, str]] = field(default_factory=set)
    num_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Overview:
    """The ledger so far. `damage`: where and how it was changed, or None."""

    num_entries: int
    num_rounds: int
    num_evaluations: int
    num_bytes: int
    is_counted: bool
    is_read: bool
    damage: str | None
    policy: str | None
    key: str
    num_rows: dict[str, int]


class LedgerIndex:
    """The rows of a ledger, oldest first. Threads may share it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._segment: Segment | None = None
        self._offset = self._line = 0
        self._point = Point()
        self._totals = Totals()
        self._rows: list[Row] = []
        self._by_seq: dict[int, Row] = {}
        self._runs: dict[str, RunTotals] = {}
        self._num_entries = 0
        self._policy: str | None = None
        self._damage: str | None = None
        self._is_read = False

    def follow(self, stop: threading.Event) -> None:
        """Read what is there and what is added, until `stop` is set. Damage ends the reading."""
        while not stop.is_set() and self._damage is None:
            self.read(stop)
            stop.wait(FOLLOW_SECONDS)

    def read(self, stop: threading.Event | None = None) -> None:
        """Read what was added since the last call."""
        try:
            head = read_head(self._folder)  # before the entries: the worker may be writing
            while self._read_batch() and not (stop is not None and stop.is_set()):
                pass
            if head is not None and head[0] > self._point.seq:
                raise LedgerError(
                    f"{self._folder}: the ledger ends with entry {self._point.seq}, and entry {head[0]} had been "
                    "written: its end was cut off"
                )
        except LedgerError as error:
            self._damage = str(error)
        except OSError as error:
            self._damage = f"{self._folder} cannot be read: {error.strerror}"
        self._is_read = True

    def overview(self) -> Overview:
        with self._lock:
            counts = Counter(row.outcome for row in self._rows)
            return Overview(
                num_entries=self._num_entries,
                num_rounds=self._totals.num_rounds,
                num_evaluations=self._totals.num_evaluations,
                num_bytes=self._totals.num_bytes,
                is_counted=self._totals.is_known,
                is_read=self._is_read,
                damage=self._damage,
                policy=self._policy,
                key=self._point.key,
                num_rows={outcome: counts[outcome] for outcome in OUTCOMES},
            )

    def run(self, run_id: str) -> RunTotals:
        """Return what left in a run."""
        with self._lock:
            return self._runs.get(run_id, RunTotals())

    def rows(self, outcome: str, run: str, first: int, count: int) -> tuple[list[Row], int]:
        """Return `count` rows, newest first, from the row `first`, and how many there are.

        Args:
            outcome: one of OUTCOMES, or empty for all.
            run: the beginning of a run's id, or empty for all.
        """
        with self._lock:
            found = [
                row
                for row in reversed(self._rows)
                if (not outcome or row.outcome == outcome) and row.run.startswith(run)
            ]
        return found[first : first + count], len(found)

    def _read_batch(self) -> bool:
        """Read some entries, and return whether there may be more. Raises LedgerError at the first that is damaged."""
        found = segments(self._folder)
        if not found:
            if self._segment is not None:
                raise LedgerError(f"{self._segment.path} is gone")
            return False
        if self._segment is None:
            self._segment, self._point = found[0], point_before(self._folder, found[0])
        following = [each for each in found if each.first_seq > self._segment.first_seq]
        with self._segment.path.open("rb") as file:
            if (size := file.seek(0, 2)) < self._offset:
                raise LedgerError(f"{self._segment.path} has become shorter: its end was cut off")
            file.seek(self._offset)
            for _ in range(_BATCH):
                line = file.readline(MAX_LINE_BYTES)
                is_last = not following and self._offset + len(line) >= size
                if not line or (is_last and not is_complete_object(line)):
                    break  # the end, or a line that the worker is writing or a crash cut short
                self._take(line)
            else:
                return True
        if following:
            self._segment, self._offset, self._line = following[0], 0, 0
        return bool(following)

    def _take(self, line: bytes) -> None:
        assert self._segment is not None, "a segment is open"
        try:
            entry = parse_line(line)
            point = self._point.after(entry)
        except LedgerError as error:
            raise LedgerError(f"{self._segment.path}, line {self._line + 1}: {error}") from None
        with self._lock:
            self._point = point
            self._offset += len(line)
            self._line += 1
            self._num_entries += 1
            self._policy = entry.body.get("policy")
            self._totals.count(entry)
            self._index(entry)

    def _index(self, entry: LedgerEntry) -> None:
        body = entry.body
        if entry.kind == "sent":
            if (sent := self._by_seq.pop(int(body.get("intent", 0)), None)) is not None:
                sent.outcome = "sent"
            return
        if entry.kind not in ("intent", "refused"):
            return
        row = Row(
            seq=entry.seq,
            time=str(body.get("time", ""))[:19].replace("T", " "),
            run=sys.intern(str(body.get("run", ""))),
            round_number=body.get("round"),
            method=sys.intern(str(body.get("method", ""))),
            outcome="unconfirmed" if entry.kind == "intent" else "refused",
            what=sys.intern(str(body["reason"]) if "reason" in body else _summary(body)),
            num_bytes=body.get("bytes"),
            digest=str(body.get("digest", ""))[:12],
            policy=sys.intern(str(body.get("policy", ""))[:8]),
        )
        self._rows.append(row)
        run = self._runs.setdefault(row.run, RunTotals())
        run.method = row.method
        if entry.kind == "refused":
            return
        self._by_seq[entry.seq] = row
        update = (int(body.get("round", 0)), str(body.get("digest")))
        if update not in run.digests:  # sent again after an interruption: counted once
            run.digests.add(update)
            run.rounds.add(update[0])
            run.num_bytes += int(body.get("bytes", 0))


def _summary(body: dict[str, Any]) -> str:
    """Return the kinds of an update's tensors and their number, with the metrics that were sent with them.

    >>> _summary({"artifact": ["weights"], "tensors": ["encoder.a", "encoder.b"], "numbers": ["loss=0.5"]})
    'weights: 2 tensors; metrics: loss'
    """
    tensors = body.get("tensors", ())
    names = ", ".join(str(number).partition("=")[0] for number in body.get("numbers", ()))
    kinds = ", ".join(map(str, body.get("artifact", ()))) or "tensors"
    found = f"{kinds}: {len(tensors)} tensor{'s' * (len(tensors) != 1)}"
    return f"{found}; metrics: {names}" if names else found
