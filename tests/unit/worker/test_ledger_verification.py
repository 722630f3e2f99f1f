"""A changed ledger is detected. A ledger that was rotated, archived or written by an earlier version is valid."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedssl.protocol.ledger import LedgerAnchor, receipt_message
from fedssl_worker.disclosure.ledger import Ledger, LedgerError, Point
from fedssl_worker.disclosure.ledger.chain import read_checkpoint
from fedssl_worker.disclosure.ledger.entries import LedgerEntry, entry_hash, parse_line
from fedssl_worker.disclosure.ledger.keys import make_key, read_key
from fedssl_worker.disclosure.ledger.segments import read_head, write_checkpoint, write_head
from fedssl_worker.disclosure.ledger.verification import Report, read_entries, verify

from .ledgers import FIRST, SHORT, crashed_after, filled, kinds


def rewritten(folder: Path, change: Callable[[list[bytes]], list[bytes]], name: str = FIRST) -> None:
    path = folder / name
    path.write_bytes(b"".join(change(path.read_bytes().splitlines(keepends=True))))


def _edited(line: bytes, **changes: Any) -> bytes:
    """Return the entry with another body and the hash of that body. The signature stays the old one."""
    entry = parse_line(line)
    body = {**entry.body, **changes}
    return LedgerEntry(body, entry_hash(entry.previous, body), entry.previous, entry.signature).line()


def _unsigned(line: bytes) -> bytes:
    entry = parse_line(line)
    return LedgerEntry(entry.body, entry.hash, entry.previous, "").line()


CHANGES: dict[str, tuple[Callable[[list[bytes]], list[bytes]], str]] = {
    "an entry removed": (lambda lines: lines[:2] + lines[3:], "entries are missing"),
    "the opening removed": (lambda lines: lines[1:], "entries are missing"),
    "two exchanged": (lambda lines: [lines[0], lines[2], lines[1], *lines[3:]], "out of order"),
    "one repeated": (lambda lines: [*lines[:2], *lines[1:]], "out of order"),
    "a digest changed": (lambda lines: [lines[0], lines[1].replace(b"d" * 64, b"e" * 64), *lines[2:]], "was changed"),
    "a body and its hash changed": (lambda lines: [lines[0], _edited(lines[1], bytes=1), *lines[2:]], "not signed by"),
    "the last with its hash": (lambda lines: [*lines[:-1], _edited(lines[-1], bytes=1)], "not signed by"),
    "a signature removed": (lambda lines: [lines[0], _unsigned(lines[1]), *lines[2:]], "not signed by"),
    "a line made unreadable": (lambda lines: [lines[0], b"{}\n", *lines[2:]], "line 2: this is not an entry"),
    "spaces": (
        lambda lines: [lines[0], lines[1].replace(b",", b", "), *lines[2:]],
        "not an entry in its canonical form",
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_every_change_is_detected(tmp_path: Path, name: str) -> None:
    filled(tmp_path / "ledger").close()
    change, words = CHANGES[name]
    rewritten(tmp_path / "ledger", change)
    with pytest.raises(LedgerError, match=words):
        verify(tmp_path / "ledger")
    with pytest.raises(LedgerError):  # it cannot be continued either
        Ledger(tmp_path / "ledger")


def test_another_key_cannot_continue_a_ledger(tmp_path: Path) -> None:
    folder, key = tmp_path / "ledger", make_key(tmp_path / "key")
    ledger = filled(folder)
    ledger.close()
    end, body = ledger.anchor, {"kind": "opened", "key": key.public, "seq": ledger.anchor.seq + 1, "signed": "yes"}
    hashed = entry_hash(end.head, body)
    opened = LedgerEntry(body, hashed, end.head, key.sign(bytes.fromhex(hashed)))
    rewritten(folder, lambda lines: [*lines, opened.line()])
    with pytest.raises(LedgerError, match="exactly one entry `opened`, its first"):
        verify(folder)
    with pytest.raises(LedgerError, match="exactly one entry `opened`, its first"):
        Ledger(folder)


@pytest.mark.parametrize(
    ("head", "at", "words"),
    [
        (None, "2020-01-01T00:00:00.000000+00:00", "the coordinator's signature does not match the receipt"),
        ("f" * 64, "2026-11-20T12:00:00.000000+00:00", "a receipt for an entry 3 that differs from this ledger's"),
    ],
)
def test_a_receipt_for_another_ledger_or_entry_is_detected(
    tmp_path: Path, head: str | None, at: str, words: str
) -> None:
    ledger, coordinator = filled(tmp_path / "ledger", 1), make_key(tmp_path / "key")
    anchor = LedgerAnchor(key=ledger.key, seq=3, head=head or ledger.anchor.head)
    signature = coordinator.sign(receipt_message("a", anchor, "2026-11-20T12:00:00.000000+00:00", None))
    about = {"client": "a", "anchored_seq": 3, "head": anchor.head, "at": at}
    ledger.append("receipt", **about, coordinator=coordinator.public, signature=signature)
    with pytest.raises(LedgerError, match=words):
        verify(tmp_path / "ledger")


@pytest.fixture(scope="module")
def intact(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bytes, Report]:
    folder = tmp_path_factory.mktemp("intact") / "ledger"
    filled(folder).close()
    return folder, (folder / FIRST).read_bytes(), verify(folder)


@given(data=st.data())
def test_every_flipped_bit_is_detected(intact: tuple[Path, bytes, Report], data: st.DataObject) -> None:
    folder, content, before = intact
    position = data.draw(st.integers(0, len(content) - 1))
    flipped = bytearray(content)
    flipped[position] ^= 1 << data.draw(st.integers(0, 7))
    (folder / FIRST).write_bytes(flipped)
    try:
        report = verify(folder)
    except LedgerError:
        return
    assert report.torn_bytes  # the last line is reported as incomplete: it proves nothing
    assert report.num_entries == before.num_entries - 1


def test_a_change_before_the_last_line_is_never_taken_for_a_crash(tmp_path: Path) -> None:
    filled(tmp_path / "ledger").close()
    rewritten(tmp_path / "ledger", lambda lines: [*lines[:3], bytes(len(lines[3]) - 1) + b"\n", *lines[4:]])
    with pytest.raises(LedgerError, match="line 4"):
        Ledger(tmp_path / "ledger")


# Segments


def test_a_new_segment_continues_the_chain(tmp_path: Path) -> None:
    folder = tmp_path / "ledger"
    ledger = filled(folder, 4, SHORT)
    names = sorted(path.name for path in folder.glob("0*"))
    assert names == ["000000000001.jsonl", "000000000005.jsonl", "000000000009.jsonl"]
    assert kinds(folder) == ["opened", "intent", "sent", "intent", "rotated", "sent", "intent", "sent", "rotated",
                             "intent", "sent"]  # fmt: skip
    report = verify(folder)
    assert (report.num_entries, report.num_segments, report.unconfirmed) == (11, 3, [])
    assert ledger.anchor.head == report.point.head == Ledger(folder).anchor.head


def test_old_segments_may_be_deleted_if_a_checkpoint_replaces_them(tmp_path: Path) -> None:
    folder = tmp_path / "ledger"
    ledger = filled(folder, 4, SHORT)
    whole = verify(folder)
    for name in ("000000000001.jsonl", "000000000005.jsonl"):
        (folder / name).unlink()
    with pytest.raises(LedgerError, match=r"--from .*/checkpoint-000000000008\.json"):
        verify(folder)
    start = read_checkpoint(folder / "checkpoint-000000000008.json")
    report = verify(folder, start)
    assert (report.first_seq, report.point) == (9, whole.point)
    Ledger(folder, rules=SHORT).append("refused", reason="x")
    assert verify(folder, start).point.seq == ledger.anchor.seq + 1


def test_a_ledger_can_be_verified_from_a_checkpoint_in_its_middle(tmp_path: Path) -> None:
    folder = tmp_path / "ledger"
    filled(folder, 4, SHORT)
    assert verify(folder, read_checkpoint(folder / "checkpoint-000000000004.json")).num_entries == 7
    with pytest.raises(LedgerError, match="does not continue"):
        verify(folder, Point(seq=4, head="0" * 64, key="0" * 64))


@pytest.mark.parametrize("part", ['"seq":4', '"signed":1', '"head":"', '"key":"'])
def test_a_changed_checkpoint_is_detected(tmp_path: Path, part: str) -> None:
    folder = tmp_path / "ledger"
    filled(folder, 4, SHORT)
    path = folder / "checkpoint-000000000004.json"
    text = path.read_text()
    end = text.index(part) + len(part)
    position = end if part.endswith('"') else end - 1
    path.write_text(text[:position] + ("0" if text[position] != "0" else "2") + text[position + 1 :])
    with pytest.raises(LedgerError):
        read_checkpoint(path)


def test_checkpoints_of_other_entries_are_detected(tmp_path: Path) -> None:
    folder, path = tmp_path / "ledger", tmp_path / "ledger" / "checkpoint-000000000004.json"
    filled(folder, 2, SHORT).close()
    point, other = read_checkpoint(path), make_key(tmp_path / "key")
    write_checkpoint(folder, Point(4, point.head, other.public), other)
    with pytest.raises(LedgerError, match="is of another ledger"):
        verify(folder)
    write_checkpoint(folder, Point(4, "f" * 64, point.key), read_key(folder / "key"))
    with pytest.raises(LedgerError, match="differs from this ledger's entry 4"):
        verify(folder)
    write_checkpoint(folder, Point(3, point.head, point.key), read_key(folder / "key"))
    (folder / "checkpoint-000000000003.json").rename(path)
    with pytest.raises(LedgerError, match="is for another segment: it is of entry 3"):
        Ledger(folder)


def test_a_ledger_without_its_segments_is_not_started_again(tmp_path: Path) -> None:
    folder = tmp_path / "ledger"
    filled(folder, 4, SHORT)
    for path in folder.glob("0*"):
        path.unlink()
    with pytest.raises(LedgerError, match="is missing: restore it"):
        Ledger(folder)


@pytest.mark.parametrize("stage", ["before the segment", "before its first entry"])
def test_a_ledger_is_continued_after_a_crash_during_a_rotation(tmp_path: Path, stage: str) -> None:
    folder = tmp_path / "ledger"
    filled(folder, 2, SHORT)
    new = folder / "000000000005.jsonl"
    new.write_bytes(b"") if stage == "before its first entry" else new.unlink()
    crashed_after(folder, 4)
    assert verify(folder).point.seq == 4
    Ledger(folder, rules=SHORT).append("refused", reason="x")
    assert verify(folder).num_entries == len(kinds(folder))
    assert kinds(folder)[-1] == "refused"


# The end of the chain


def _emptied(folder: Path, name: str) -> None:
    (folder / name).write_bytes(b"")


ENDS: dict[str, Callable[[Path], None]] = {
    "the only segment emptied": lambda folder: [_emptied(folder, path.name) for path in folder.glob("0*")] and None,
    "the last segment emptied": lambda folder: _emptied(folder, "000000000005.jsonl"),
    "the last segment removed": lambda folder: (folder / "000000000005.jsonl").unlink(),
    "the last segment shortened": lambda folder: rewritten(folder, lambda lines: lines[:-1], "000000000005.jsonl"),
    "the last line shortened": lambda folder: rewritten(
        folder, lambda lines: [*lines[:-1], lines[-1][:-9]], "000000000005.jsonl"
    ),
    "the last line replaced by a shorter one": lambda folder: rewritten(
        folder, lambda lines: [*lines[:-1], b"{}\n"], "000000000005.jsonl"
    ),
    "all segments removed": lambda folder: [path.unlink() for path in folder.glob("0*")] and None,
    "everything removed but the key": lambda folder: (
        [path.unlink() for path in folder.iterdir() if path.name not in ("key", "head")] and None
    ),
}


@pytest.mark.parametrize("how", ENDS)
def test_a_ledger_whose_end_is_missing_is_detected_and_not_continued(tmp_path: Path, how: str) -> None:
    folder = tmp_path / "ledger"
    filled(folder, 2, SHORT).close()
    ENDS[how](folder)
    with pytest.raises(LedgerError):
        verify(folder)
    with pytest.raises(LedgerError):
        Ledger(folder)


@pytest.mark.parametrize("how", ["the only segment emptied", "the last segment emptied", "all segments removed"])
def test_an_emptied_segment_is_detected_without_the_recorded_head(tmp_path: Path, how: str) -> None:
    """Ledgers of earlier versions have no recorded head, and an attacker who empties a segment may remove it."""
    folder = tmp_path / "ledger"
    filled(folder, 2, SHORT).close()
    ENDS[how](folder)
    (folder / "head").unlink()
    with pytest.raises(LedgerError):
        verify(folder)


def test_an_emptied_segment_has_no_entries_to_show(tmp_path: Path) -> None:
    folder = tmp_path / "ledger"
    filled(folder).close()
    _emptied(folder, FIRST)
    with pytest.raises(LedgerError, match="has no entries"):
        list(read_entries(folder))


def test_a_checkpoint_shows_that_the_end_was_cut_off(tmp_path: Path) -> None:
    folder = tmp_path / "ledger"
    filled(folder, 4, SHORT).close()
    for name in ("000000000005.jsonl", "000000000009.jsonl", "head"):
        (folder / name).unlink()
    with pytest.raises(
        LedgerError, match=r"checkpoint-000000000008\.json is of entry 8, and the ledger ends with entry 4"
    ):
        verify(folder)


def test_a_head_of_another_entry_shows_that_the_end_was_replaced(tmp_path: Path) -> None:
    folder = tmp_path / "ledger"
    filled(folder).close()
    write_head(folder, 5, "0" * 64)
    with pytest.raises(LedgerError, match="the ledger's end was replaced"):
        verify(folder)


def test_a_ledger_with_a_missing_or_emptied_head_is_continued(tmp_path: Path) -> None:
    folder = tmp_path / "ledger"
    for content in (None, b"", b"00000000"):
        filled(folder, 1).close()
        (folder / "head").unlink() if content is None else (folder / "head").write_bytes(content)
        assert verify(folder).num_entries == len(kinds(folder))
        Ledger(folder).append("refused", reason="x")
        assert read_head(folder) == (verify(folder).point.seq, verify(folder).point.head)
