"""Small ledgers for tests."""

from pathlib import Path
from typing import Any

from fedssl_worker.disclosure.ledger import Ledger
from fedssl_worker.disclosure.ledger.segments import write_head
from fedssl_worker.disclosure.ledger.verification import read_entries
from fedssl_worker.disclosure.policy import LedgerRules

FIRST = "000000000001.jsonl"
FIELDS = {"run": "r", "round": 1, "digest": "d" * 64, "bytes": 12, "artifact": ["weights"], "tensors": ["encoder.w"]}
SHORT = LedgerRules(segment_entries=4)


def filled(folder: Path, num_rounds: int = 3, rules: LedgerRules | None = None) -> Ledger:
    ledger = Ledger(folder, rules=rules)
    for number in range(1, num_rounds + 1):
        intent = ledger.append("intent", **{**FIELDS, "round": number})
        ledger.append("sent", round=number, intent=intent.seq)
    return ledger


def crashed_after(folder: Path, seq: int) -> None:
    """Make entry `seq` the recorded head, or remove the head if it is 0, as if no later entry was ever whole on the
    disk."""
    (folder / "head").unlink()
    for entry in read_entries(folder) if seq else ():
        if entry.seq == seq:
            write_head(folder, seq, entry.hash)


def bodies(folder: Path) -> list[dict[str, Any]]:
    return [entry.body for entry in read_entries(folder)]


def kinds(folder: Path) -> list[str]:
    return [body["kind"] for body in bodies(folder)]
