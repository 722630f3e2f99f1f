"""The ledger: its bytes, what a crash leaves of it, and which changes are detected."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from fedssl.protocol.ledger import canonical
from fedssl_worker.disclosure.ledger import Ledger, LedgerError
from fedssl_worker.disclosure.ledger.entries import GENESIS, LedgerEntry, entry_hash, parse_line
from fedssl_worker.disclosure.ledger.keys import is_signed_by
from fedssl_worker.disclosure.ledger.verification import read_entries, verify
from fedssl_worker.disclosure.policy import LedgerRules

from .ledgers import FIELDS, FIRST, SHORT, bodies, crashed_after, filled, kinds

# Bytes


def test_the_hash_is_the_one_that_the_design_defines() -> None:
    """Genesis is 32 zero bytes; the hash covers `fedssl/ledger/1\\n`, the previous hash, and the canonical body."""
    body = {"kind": "opened", "seq": 1}
    known = "69723132fa5054866c7a382d315df161d012f3ffeab283b7dc67991cd6a8e220"
    assert bytes.fromhex(GENESIS) == bytes(32)
    assert canonical(body) == b'{"kind":"opened","seq":1}'
    assert hashlib.sha256(b"fedssl/ledger/1\n" + bytes(32) + canonical(body)).hexdigest() == known
    assert entry_hash(GENESIS, body) == known


def test_the_signature_is_ed25519_over_the_hash() -> None:
    key = Ed25519PrivateKey.from_private_bytes(bytes([1]) * 32)
    hashed = bytes.fromhex("69723132fa5054866c7a382d315df161d012f3ffeab283b7dc67991cd6a8e220")
    public, signature = key.public_key().public_bytes_raw().hex(), key.sign(hashed).hex()
    assert public == "8a88e3dd7409f195fd52db2d3cba5d72ca6709bf1d94121bf3748801b40f6f5c"
    assert is_signed_by(public, signature, hashed)
    assert not is_signed_by(public, signature, hashed[::-1])
    assert not is_signed_by("0" * 64, signature, hashed)
    assert not is_signed_by(public, "", hashed)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ({"b": 1, "a": [2, "x", {}], "a_0": -(2**53) + 1}, b'{"a":[2,"x",{}],"a_0":-9007199254740991,"b":1}'),
        ({"text": 'é"\\\n\x00/'}, b'{"text":"\xc3\xa9\\"\\\\\\n\\u0000/"}'),
    ],
)
def test_values_have_the_expected_canonical_bytes(value: dict[str, Any], text: bytes) -> None:
    assert canonical(value) == text
    assert json.loads(text) == value


@pytest.mark.parametrize(
    "value",
    [{"a": 0.5}, {"a": 2**53}, {"a": -(2**53)}, {"a": True}, {"a": None}, {"A": 1}, {"a-b": 1}, {"": 1}, {1: 1},
     {"a": {"é": 1}}, {"a": b"x"}, {"a": "\ud800"}, {"a": [[[[[[[[[[1]]]]]]]]]]}],
)  # fmt: skip
def test_values_without_a_canonical_form_are_refused(value: dict[Any, Any]) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - a UnicodeEncodeError is one too
        canonical(value)


def test_a_line_that_differs_from_its_canonical_bytes_is_refused() -> None:
    body = {"kind": "opened", "seq": 1}
    entry = LedgerEntry(body, entry_hash(GENESIS, body), GENESIS, "ab" * 64)
    line = entry.line()
    assert parse_line(line) == entry
    for other in (
        line.replace(b'":', b'": ', 1),
        line[:-1],
        line + b"\n",
        b"[]\n",
        b"{}\n",
        b"null\n",
        b"\xff\n",
        line.replace(b'"seq":1', b'"seq":1,"seq":1'),
        line.replace(b'"seq":1', b'"seq":1.0'),
        line.replace(b"ab", b"AB", 1),
        b'{"a":' * 100_000,
    ):
        with pytest.raises(LedgerError):
            parse_line(other)


# Writing


def test_entries_contain_the_declared_fields_and_a_random_salt(tmp_path: Path) -> None:
    ledger = filled(tmp_path / "ledger", 1)
    opened, intent, sent = bodies(tmp_path / "ledger")
    assert opened["key"] == ledger.key
    assert {"kind", "policy", "salt", "seq", "time"} <= intent.keys() & sent.keys() & opened.keys()
    assert {name: intent[name] for name in FIELDS} == FIELDS
    assert intent["policy"] == "none"
    assert len({body["salt"] for body in (opened, intent, sent)}) == 3
    assert all(len(body["salt"]) == 32 for body in (opened, intent, sent))
    assert (intent["kind"], intent["seq"], sent["intent"]) == ("intent", 2, 2)


def test_only_the_owner_may_read_the_key_and_the_folder(tmp_path: Path) -> None:
    filled(tmp_path / "ledger")
    key = tmp_path / "ledger/key"
    assert key.stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "ledger").stat().st_mode & 0o777 == 0o700
    assert key.read_text().startswith("-----BEGIN PRIVATE KEY-----")
    key.chmod(0o640)
    with pytest.raises(LedgerError, match="chmod 600"):
        Ledger(tmp_path / "ledger")


def test_a_ledger_is_continued_after_a_restart(tmp_path: Path) -> None:
    first = filled(tmp_path / "ledger")
    again = Ledger(tmp_path / "ledger")
    assert again.anchor == first.anchor
    again.append("refused", reason="half a character: \ud800", run="r")
    assert bodies(tmp_path / "ledger")[-1]["reason"] == "half a character: \\ud800"
    assert verify(tmp_path / "ledger").num_entries == 8


def test_a_ledger_is_not_continued_if_its_key_is_missing_or_another(tmp_path: Path) -> None:
    filled(tmp_path / "ledger")
    filled(tmp_path / "other")
    (tmp_path / "ledger/key").unlink()
    with pytest.raises(LedgerError, match="cannot read the ledger's key"):
        Ledger(tmp_path / "ledger")
    (tmp_path / "other/key").rename(tmp_path / "ledger/key")
    with pytest.raises(LedgerError, match="not the key of this ledger"):
        Ledger(tmp_path / "ledger")
    (tmp_path / "ledger/key").write_text("no key")
    with pytest.raises(LedgerError, match="not a PEM private key"):
        Ledger(tmp_path / "ledger")


def test_a_ledger_file_of_an_earlier_version_is_kept_and_recorded(tmp_path: Path) -> None:
    earlier = tmp_path / "ledger.jsonl"
    earlier.write_bytes(b'{"time":"2026"}\n')
    filled(tmp_path / "ledger")
    assert earlier.read_bytes() == b'{"time":"2026"}\n'
    opened = bodies(tmp_path / "ledger")[0]
    assert opened["earlier_file"] == "ledger.jsonl"
    assert opened["earlier_bytes"] == 16
    assert opened["earlier_digest"] == hashlib.sha256(earlier.read_bytes()).hexdigest()


def test_entries_are_unsigned_if_the_policy_turns_signing_off(tmp_path: Path) -> None:
    ledger = filled(tmp_path / "ledger", 1, LedgerRules(sign=False))
    ledger.change_policy("p" * 64, LedgerRules(sign=True))
    ledger.append("refused", reason="x")
    entries = list(read_entries(tmp_path / "ledger"))
    assert [bool(entry.signature) for entry in entries] == [True, False, False, True, True]
    assert [entry.body["policy"] for entry in entries] == ["none"] * 3 + ["p" * 64] * 2
    assert verify(tmp_path / "ledger").num_unsigned == 2


def test_a_policy_that_changed_between_starts_is_recorded(tmp_path: Path) -> None:
    filled(tmp_path / "ledger", 1).close()
    Ledger(tmp_path / "ledger", policy="p" * 64)
    Ledger(tmp_path / "ledger", policy="p" * 64)
    assert kinds(tmp_path / "ledger") == ["opened", "intent", "sent", "policy"]


@pytest.mark.parametrize("tries", [1, 3])
def test_a_full_disk_leaves_an_intact_ledger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tries: int) -> None:
    ledger = filled(tmp_path / "ledger", 1)

    def write_half(file: int, content: bytes) -> int:
        monkeypatch.setattr(os, "write", fail)
        return real(file, content[: len(content) // 2])

    def fail(file: int, content: bytes) -> int:
        raise OSError(28, "No space left on device")

    real = os.write
    monkeypatch.setattr(os, "write", write_half)
    for _ in range(tries):
        with pytest.raises(LedgerError, match="No space left on device; nothing leaves"):
            ledger.append("intent", **FIELDS)
    monkeypatch.setattr(os, "write", real)
    ledger.append("intent", **FIELDS)
    # `recovered` records the bytes that were cut off, if there was space for it. They had never been an entry.
    assert [kind for kind in kinds(tmp_path / "ledger") if kind != "recovered"] == [
        "opened",
        "intent",
        "sent",
        "intent",
    ]
    assert kinds(tmp_path / "ledger").count("recovered") == (tries == 1)
    verify(tmp_path / "ledger")


def test_a_ledger_that_disappears_while_it_is_open_is_not_started_again(tmp_path: Path) -> None:
    """As if the disk of STATE was unmounted: nothing is written in its place, so that the disk can be mounted again."""
    folder, elsewhere = tmp_path / "ledger", tmp_path / "elsewhere"
    ledger = filled(folder, 1)
    folder.rename(elsewhere)
    with pytest.raises(LedgerError, match="No such file or directory; nothing leaves"):
        ledger.append("intent", **FIELDS)  # written through the open file, but without its head
    for _ in range(2):
        with pytest.raises(LedgerError, match="has disappeared after entry 3: mount its disk again"):
            ledger.append("intent", **FIELDS)
    assert not folder.exists()
    elsewhere.rename(folder)
    ledger.append("intent", **FIELDS)
    assert kinds(folder) == ["opened", "intent", "sent", "intent", "intent"]
    verify(folder)


def test_a_ledger_that_was_restored_with_fewer_entries_is_not_continued(tmp_path: Path) -> None:
    """As if STATE was restored from a copy while the worker ran: otherwise two entries would get the same number."""
    folder = tmp_path / "ledger"
    ledger = filled(folder, 1)
    shutil.copytree(folder, tmp_path / "copy")
    ledger.append("intent", **FIELDS)
    shutil.rmtree(folder)
    with pytest.raises(LedgerError, match="nothing leaves"):
        ledger.append("intent", **FIELDS)
    (tmp_path / "copy").rename(folder)
    for _ in range(2):
        with pytest.raises(LedgerError, match="ends with entry 3, and entry 4 had been written"):
            ledger.append("intent", **FIELDS)


# Crashes


@pytest.mark.parametrize("keep", [1, 40, -1], ids=["a byte", "a part", "all but the newline"])
def test_a_torn_last_line_is_removed_and_recorded(tmp_path: Path, keep: int) -> None:
    filled(tmp_path / "ledger", 2).close()
    path = tmp_path / "ledger" / FIRST
    *whole, last = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(whole) + last[:keep])
    crashed_after(tmp_path / "ledger", 4)
    report = verify(tmp_path / "ledger")
    assert (report.num_entries, report.torn_bytes) == (4, len(last[:keep]))
    assert report.unconfirmed == [4]
    Ledger(tmp_path / "ledger").append("refused", reason="x")
    recovered = bodies(tmp_path / "ledger")[4]
    assert (recovered["kind"], recovered["seq"], recovered["bytes"]) == ("recovered", 5, len(last[:keep]))
    assert recovered["digest"] == hashlib.sha256(last[:keep]).hexdigest()
    assert verify(tmp_path / "ledger").num_entries == 6


def test_a_last_line_with_zero_bytes_in_its_middle_is_recovered(tmp_path: Path) -> None:
    filled(tmp_path / "ledger", 1).close()
    path = tmp_path / "ledger" / FIRST
    content = path.read_bytes()
    path.write_bytes(content[:-60] + bytes(40) + content[-20:])
    crashed_after(tmp_path / "ledger", 2)
    Ledger(tmp_path / "ledger")
    assert kinds(tmp_path / "ledger") == ["opened", "intent", "recovered"]


def test_an_incomplete_first_line_is_recovered(tmp_path: Path) -> None:
    filled(tmp_path / "ledger", 0).close()
    path = tmp_path / "ledger" / FIRST
    path.write_bytes(path.read_bytes()[:30])
    crashed_after(tmp_path / "ledger", 0)
    Ledger(tmp_path / "ledger")
    assert kinds(tmp_path / "ledger") == ["opened", "recovered"]
    verify(tmp_path / "ledger")


_CHILD = Path(__file__).parent / "ledger_killed.py"


def test_a_process_killed_after_any_fsync_leaves_an_intact_ledger(tmp_path: Path) -> None:
    """For each n, a process killed after its n-th fsync leaves an intact chain with every entry that `append`
    returned."""
    done = subprocess.run([sys.executable, str(_CHILD), str(tmp_path)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    points = sorted(tmp_path.iterdir())
    assert len(points) > 25  # the key, entries, a checkpoint and a new segment each have one or more
    seen: set[str] = set()
    for point in points:
        folder, said = point / "ledger", (point / "said").read_text().split()
        ledger = Ledger(folder, rules=SHORT)
        report = verify(folder)
        written = [body["salt"] for body in bodies(folder)]
        assert set(said) <= set(written), point.name  # an entry that `append` returned is on the disk
        assert report.num_entries == report.point.seq
        ledger.append("refused", reason="alive")
        verify(folder)
        seen |= set(kinds(folder))
    assert {"opened", "intent", "sent", "rotated"} <= seen
