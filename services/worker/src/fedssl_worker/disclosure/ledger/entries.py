"""One entry of the ledger: its bytes, its hash, and its line in a segment."""

import hashlib
import json
import re
from dataclasses import dataclass
from typing import Any, Literal

from fedssl.errors import FedSSLError
from fedssl.protocol.ledger import canonical

Kind = Literal["opened", "policy", "intent", "sent", "refused", "revealed", "receipt", "recovered", "rotated"]
"""opened: the first entry · policy: another policy is in force · intent: an artifact is about to leave · sent: it has
arrived · refused: an artifact may not leave · revealed: shares of masks are about to leave, after which the sum of a
secure round can be read · receipt: the coordinator holds an anchor of this ledger · recovered: a
crash had cut the last line short · rotated: a new segment begins."""

EVALUATION = "evaluation"
"""The kind of artifact of a site's counts, which are not an update."""

GENESIS = "0" * 64
"""The previous hash of the first entry."""

MAX_LINE_BYTES = 16 << 20
_DOMAIN = b"fedssl/ledger/1\n"
_HASH = re.compile(r"[0-9a-f]{64}")
_SIGNATURE = re.compile(r"([0-9a-f]{128})?")


class LedgerError(FedSSLError):
    """The ledger cannot be written or read, or was changed."""


@dataclass(frozen=True, slots=True)
class LedgerEntry:
    """One entry. Hashes and signature are hexadecimal; the signature is empty if the policy turns signing off."""

    body: dict[str, Any]
    hash: str
    previous: str
    signature: str

    @property
    def seq(self) -> int:
        """The entry's number, from 1."""
        return int(self.body["seq"])

    @property
    def kind(self) -> str:
        """One of `Kind`."""
        return str(self.body["kind"])

    def line(self) -> bytes:
        """Return the entry's line, with its newline."""
        record = {"body": self.body, "hash": self.hash, "prev": self.previous, "sig": self.signature}
        return canonical(record) + b"\n"


def entry_hash(previous: str, body: dict[str, Any]) -> str:
    """Return the hash that chains a body to the previous entry.

    >>> entry_hash(GENESIS, {"kind": "opened", "seq": 1})
    '69723132fa5054866c7a382d315df161d012f3ffeab283b7dc67991cd6a8e220'
    """
    return hashlib.sha256(_DOMAIN + bytes.fromhex(previous) + canonical(body)).hexdigest()


def parse_line(line: bytes) -> LedgerEntry:
    """Return the entry in a line. Raises LedgerError unless the line is exactly what `LedgerEntry.line` returns."""
    try:
        record = json.loads(line)
        entry = LedgerEntry(record["body"], record["hash"], record["prev"], record["sig"])
        well_formed = (
            isinstance(entry.body["seq"], int)
            and isinstance(entry.body["kind"], str)
            and _HASH.fullmatch(entry.hash)
            and _HASH.fullmatch(entry.previous)
            and _SIGNATURE.fullmatch(entry.signature)
            and entry.line() == line
        )
    except (ValueError, TypeError, KeyError, RecursionError):
        raise LedgerError("this is not an entry") from None
    if not well_formed:
        raise LedgerError("this is not an entry in its canonical form")
    return entry
