"""The chain: which entry may follow which. Writing, recovery and verification all use these rules."""

import json
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from fedssl.protocol.base import Digest, StrictModel
from fedssl.protocol.ledger import PublicKey, Sequence, Signature, canonical
from fedssl_worker.disclosure.ledger.entries import GENESIS, LedgerEntry, LedgerError, entry_hash
from fedssl_worker.disclosure.ledger.keys import SigningKey, is_signed_by

_CHECKPOINT_DOMAIN = b"fedssl/checkpoint/1\n"
_ALWAYS_SIGNED = ("opened", "policy")  # they determine whether entries are signed, so they are always signed


@dataclass(frozen=True, slots=True)
class Point:
    """A point in a chain: the newest entry, the ledger's public key, and whether further entries must be signed."""

    seq: int = 0
    head: str = GENESIS
    key: str = ""
    signed: bool = True

    def after(self, entry: LedgerEntry) -> "Point":
        """Return the point after one more entry. Raises LedgerError unless that entry belongs here."""
        if entry.seq != self.seq + 1:
            raise LedgerError(f"entry {entry.seq} follows entry {self.seq}: entries are missing or out of order")
        if entry.previous != self.head:
            raise LedgerError(f"entry {entry.seq} does not continue the previous entry: one of the two was changed")
        if entry.hash != entry_hash(entry.previous, entry.body):
            raise LedgerError(f"entry {entry.seq} was changed: its hash does not match")
        if (entry.kind == "opened") != (self.seq == 0):
            raise LedgerError(f"entry {entry.seq}: a ledger has exactly one entry `opened`, its first")
        extended = self.extended(entry)
        wanted = bool(entry.signature) or self.wants_signature(entry.kind)
        if wanted and not is_signed_by(extended.key, entry.signature, bytes.fromhex(entry.hash)):
            raise LedgerError(f"entry {entry.seq} was not signed by this ledger's key {extended.key[:8]}")
        return extended

    def extended(self, entry: LedgerEntry) -> "Point":
        """Return the point after one more entry, without checking that the entry belongs here."""
        key = str(entry.body.get("key")) if entry.kind == "opened" else self.key
        signed = entry.body.get("signed") == "yes" if entry.kind in _ALWAYS_SIGNED else self.signed
        return Point(entry.seq, entry.hash, key, signed)

    def wants_signature(self, kind: str) -> bool:
        """Return whether the next entry must be signed if it is of this kind."""
        return self.signed or kind in _ALWAYS_SIGNED


class _Body(StrictModel):
    format: int
    seq: Sequence
    head: Digest
    key: PublicKey
    signed: bool


class _Checkpoint(StrictModel):
    body: _Body
    sig: Signature


def checkpoint_text(point: Point, key: SigningKey) -> bytes:
    """Return a signed statement of a point, from which the chain can be verified without earlier segments."""
    body = {"format": 1, "seq": point.seq, "head": point.head, "key": point.key, "signed": int(point.signed)}
    return canonical({"body": body, "sig": key.sign(_CHECKPOINT_DOMAIN + canonical(body))}) + b"\n"


def read_checkpoint(path: Path) -> Point:
    """Return the point in a checkpoint. Raises LedgerError if its own key did not sign it."""
    try:
        document = json.loads(path.read_bytes())
        checkpoint = _Checkpoint.model_validate(document)
        message = _CHECKPOINT_DOMAIN + canonical(document["body"])
    except OSError as error:
        raise LedgerError(f"cannot read the checkpoint {path}: {error.strerror}") from None
    except (ValidationError, ValueError, RecursionError):
        raise LedgerError(f"{path} is not a checkpoint of a ledger") from None
    body = checkpoint.body
    if not is_signed_by(body.key, checkpoint.sig, message):
        raise LedgerError(f"the checkpoint {path} was changed: its signature does not match")
    return Point(body.seq, body.head, body.key, body.signed)
