"""Verifies that a ledger was not changed, and that it reaches as far as the coordinator's anchors."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from fedssl.protocol.ledger import LedgerAnchor, SentBroadcast, receipt_message
from fedssl_worker.disclosure.ledger.chain import Point, read_checkpoint
from fedssl_worker.disclosure.ledger.entries import LedgerEntry, LedgerError
from fedssl_worker.disclosure.ledger.keys import is_signed_by
from fedssl_worker.disclosure.ledger.segments import (
    Segment,
    TornLine,
    checkpoints,
    read_head,
    read_segment,
    segments,
)


@dataclass(slots=True)
class Report:
    """The contents of a verified ledger."""

    first_seq: int
    point: Point
    num_segments: int
    num_entries: int = 0
    num_unsigned: int = 0
    num_receipts: int = 0
    torn_bytes: int = 0
    unconfirmed: list[int] = field(default_factory=list)
    """Entries `intent` without a `sent`: their artifacts may have left in whole, in part or not at all."""

    coordinators: list[str] = field(default_factory=list)
    """Public keys that signed the receipts."""

    num_anchors: int = 0
    """Number of the coordinator's anchors that were compared."""


def read_entries(folder: Path) -> Iterator[LedgerEntry]:
    """Yield every entry, unverified. Raises LedgerError at a line that is not an entry, and if there is no entry."""
    found = segments(folder)
    if not found:
        raise LedgerError(f"there is no ledger in {folder}")
    is_empty = True
    for _, line in _lines(found):
        if isinstance(line, LedgerEntry):
            is_empty = False
            yield line
    if is_empty:
        raise LedgerError(f"the ledger in {folder} has no entries")


def verify(folder: Path, start: Point | None = None, anchors: Sequence[LedgerAnchor] = ()) -> Report:
    """Verify the chain from its beginning, or from a checkpoint. Raises LedgerError if anything was changed.

    Args:
        start: the checkpoint to begin at.
        anchors: the coordinator's anchors of this ledger. Only they reveal that its end was cut off if the file that
            records the newest entry was removed or changed too.
    """
    head = read_head(folder)  # before the segments: the worker may be writing
    point = start or Point()
    found = _segments_after(folder, point)
    report = Report(point.seq + 1, point, len(found))
    hashes = {point.seq: point.head}
    for place, line in _lines(found):
        if isinstance(line, TornLine):
            report.torn_bytes = len(line.content)
            break
        try:
            report.point = report.point.after(line)
            hashes[line.seq] = line.hash
            _count_entry(report, line, hashes)
        except LedgerError as error:
            raise LedgerError(f"{place}: {error}") from None
    _check_end(report, found[-1], head)
    _compare_head(report, head, hashes)
    _compare_checkpoints(report, folder, hashes)
    for anchor in sorted(anchors, key=lambda anchor: anchor.key != report.point.key):
        _compare_anchor(report, anchor, hashes)
    return report


def read_anchors(path: Path) -> list[LedgerAnchor]:
    """Return the anchors in a file from `fedssl client anchors --format json` or the REST API. Raises LedgerError."""
    try:
        document: Any = json.loads(path.read_bytes())
        items = document["items"] if isinstance(document, dict) else document
        known = [{name: item[name] for name in ("key", "seq", "head")} for item in items]
        return TypeAdapter(list[LedgerAnchor]).validate_python(known)
    except OSError as error:
        raise LedgerError(f"cannot read the anchors {path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, ValidationError, RecursionError):
        raise LedgerError(
            f"{path} has no list of anchors: write it with `fedssl client anchors CLIENT --format json`"
        ) from None


def _lines(found: Sequence[Segment]) -> Iterator[tuple[str, LedgerEntry | TornLine]]:
    for segment in found:
        for number, line in read_segment(segment.path, is_last=segment == found[-1]):
            yield f"{segment.path}, line {number}", line


def _segments_after(folder: Path, point: Point) -> list[Segment]:
    """Return the segments after a point: the ledger's beginning, or a checkpoint between two segments."""
    found = [segment for segment in segments(folder) if segment.first_seq > point.seq]
    if not found:
        raise LedgerError(f"there is no ledger in {folder}" + (f" after entry {point.seq}" if point.seq else ""))
    if found[0].first_seq != point.seq + 1:
        raise LedgerError(
            f"the ledger in {folder} begins with entry {found[0].first_seq}: earlier segments are missing. Verify it "
            f"from their last checkpoint, with --from {folder}/checkpoint-{found[0].first_seq - 1:012d}.json"
        )
    return found


def _check_end(report: Report, last: Segment, head: tuple[int, str] | None) -> None:
    """Raise LedgerError if the last segment has no entry, unless a crash explains it: none had been written to it."""
    if report.num_entries == 0:
        raise LedgerError(f"the ledger has no entries from {report.first_seq} on: {last.path} has none")
    if report.point.seq < last.first_seq and not report.torn_bytes and head is None:
        raise LedgerError(
            f"{last.path} has no entries: it was emptied, or a crash interrupted the first one. Start the worker, "
            "which continues the ledger, and verify it again with --anchors"
        )


def _compare_head(report: Report, head: tuple[int, str] | None, hashes: dict[int, str]) -> None:
    if head is None:
        return
    seq, entry_hash = head
    if seq > report.point.seq:
        raise LedgerError(
            f"entry {seq} had been written, and the ledger ends with entry {report.point.seq}: its end was cut off"
        )
    if hashes.get(seq, entry_hash) != entry_hash:
        raise LedgerError(f"entry {seq} is not the one that had been written: the ledger's end was replaced")


def _compare_checkpoints(report: Report, folder: Path, hashes: dict[int, str]) -> None:
    for path in checkpoints(folder):
        point = read_checkpoint(path)
        if point.key != report.point.key:
            raise LedgerError(f"{path} is of another ledger: its key is {point.key[:8]}")
        if point.seq > report.point.seq:
            raise LedgerError(
                f"{path} is of entry {point.seq}, and the ledger ends with entry {report.point.seq}: "
                "its end was cut off"
            )
        if hashes.get(point.seq, point.head) != point.head:
            raise LedgerError(f"{path} differs from this ledger's entry {point.seq}")


def _count_entry(report: Report, entry: LedgerEntry, hashes: dict[int, str]) -> None:
    report.num_entries += 1
    report.num_unsigned += not entry.signature
    if entry.kind == "intent":
        report.unconfirmed.append(entry.seq)
    elif entry.kind == "sent" and entry.body.get("intent") in report.unconfirmed:
        report.unconfirmed.remove(entry.body["intent"])
    elif entry.kind == "receipt":
        report.num_receipts += 1
        _check_receipt(report, entry, hashes)


def _check_receipt(report: Report, entry: LedgerEntry, hashes: dict[int, str]) -> None:
    body = entry.body
    try:
        anchor = LedgerAnchor(key=report.point.key, seq=body["anchored_seq"], head=body["head"])
        sent = {name: body[name] for name in SentBroadcast.model_fields} if "broadcast" in body else None
        message = receipt_message(
            body["client"], anchor, body["at"], None if sent is None else SentBroadcast.model_validate(sent)
        )
        is_genuine = is_signed_by(body["coordinator"], body["signature"], message)
    except (KeyError, ValueError, TypeError):
        raise LedgerError(f"entry {entry.seq} is not a valid receipt") from None
    if not is_genuine:
        raise LedgerError(f"entry {entry.seq}: the coordinator's signature does not match the receipt")
    if hashes.get(anchor.seq, anchor.head) != anchor.head:
        raise LedgerError(f"entry {entry.seq} is a receipt for an entry {anchor.seq} that differs from this ledger's")
    if body["coordinator"] not in report.coordinators:
        report.coordinators.append(body["coordinator"])


def _compare_anchor(report: Report, anchor: LedgerAnchor, hashes: dict[int, str]) -> None:
    if anchor.key != report.point.key:
        raise LedgerError(
            f"the coordinator also holds anchors of another ledger of this client (key {anchor.key[:8]}; this one's is "
            f"{report.point.key[:8]}): one of the two replaced the other. If you know why, leave those anchors out"
        )
    if anchor.seq > report.point.seq:
        raise LedgerError(
            f"the coordinator holds an anchor of entry {anchor.seq}, and the ledger ends with entry "
            f"{report.point.seq}: its end was cut off"
        )
    if hashes.get(anchor.seq, anchor.head) != anchor.head:
        raise LedgerError(f"the coordinator's anchor of entry {anchor.seq} differs from this ledger's entry")
    report.num_anchors += 1


def signed_broadcasts(folder: Path) -> list[dict[str, Any]]:
    """Return what the coordinator has signed that it sent: the receipts of this ledger that name a broadcast.

    Raises LedgerError if the ledger cannot be read. Its chain is not verified.
    """
    found: list[dict[str, Any]] = []
    key = next((read_checkpoint(path).key for path in checkpoints(folder)), "")
    for entry in read_entries(folder):
        key = str(entry.body["key"]) if entry.kind == "opened" else key
        if entry.kind == "receipt" and "broadcast" in entry.body:
            body = {name: entry.body[name] for name in _STATEMENT if name in entry.body}
            found.append({**body, "seq": entry.body["anchored_seq"], "ledger": key})
    return found


_HOW = "take the output of `fedssl-worker ledger broadcasts --format json`"
_STATEMENT = ("run", "round", "broadcast", "client", "head", "at", "coordinator", "signature")


def broadcast_differences(own: Sequence[dict[str, Any]], other: Sequence[dict[str, Any]]) -> tuple[int, list[str]]:
    """Compare what a coordinator has signed for two clients. Return how many rounds both have, and the differences.

    A coordinator may have had a client train one round several times, so all pairs are compared. Raises LedgerError if
    a signature does not match.
    """
    known: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for row in map(_genuine, own):
        known.setdefault((row["run"], row["round"]), []).append(row)
    shared = [row for row in map(_genuine, other) if (row["run"], row["round"]) in known]
    differences = []
    for row in shared:
        about = f"run {row['run']}, round {row['round']}"
        for mine in known[row["run"], row["round"]]:
            for name in ("broadcast", "coordinator"):
                if mine[name] != row[name]:
                    differences.append(
                        f"{about}: {name} {mine[name]} for {mine['client']}, {row[name]} for {row['client']}"
                    )
    return len({(row["run"], row["round"]) for row in shared}), list(dict.fromkeys(differences))


def read_broadcasts(path: Path) -> list[dict[str, Any]]:
    """Return the list that another owner's `ledger broadcasts` has written. Raises LedgerError."""
    try:
        return TypeAdapter(list[dict[str, Any]]).validate_json(path.read_bytes())
    except (OSError, ValidationError):
        raise LedgerError(f"{path} is not a list of signed broadcasts: {_HOW}") from None


def _genuine(row: dict[str, Any]) -> dict[str, Any]:
    try:
        anchor = LedgerAnchor(key=row["ledger"], seq=row["seq"], head=row["head"])
        sent = SentBroadcast.model_validate({name: row[name] for name in SentBroadcast.model_fields})
        message = receipt_message(row["client"], anchor, row["at"], sent)
        is_genuine = is_signed_by(row["coordinator"], row["signature"], message)
    except (KeyError, ValueError, TypeError):
        raise LedgerError(f"this is not a list of signed broadcasts: {_HOW}") from None
    if not is_genuine:
        raise LedgerError(f"the signature about run {row['run']}, round {row['round']} does not match")
    return row
