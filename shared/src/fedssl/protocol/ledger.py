"""Anchors of a worker's ledger and the coordinator's receipts for them, and the canonical bytes that both sign.

A worker keeps a ledger of what left its machine. An anchor is the number and the hash of its newest entry: the
coordinator keeps it and signs a receipt, so that neither can deny later how far the ledger went.
"""

import json
from typing import Annotated, Any
from uuid import UUID

from pydantic import Field, StringConstraints

from fedssl.protocol.base import ClientId, Digest, StrictModel

PublicKey = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
"""An Ed25519 public key, 32 bytes in lower-case hexadecimal."""

Signature = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{128}$")]
"""An Ed25519 signature, 64 bytes in lower-case hexadecimal."""

Sequence = Annotated[int, Field(ge=1, lt=2**53)]
"""An entry's number in its ledger, from 1 without a gap."""

_KEY_CHARACTERS = frozenset("abcdefghijklmnopqrstuvwxyz0123456789_")
_MOST = 2**53  # readers of JSON do not agree on larger numbers
_DEEPEST = 8


def canonical(value: dict[str, Any]) -> bytes:
    """Return the one form of a JSON object that is hashed and signed.

    Keys of `[a-z0-9_]`, sorted; no spaces; UTF-8; whole numbers below 2^53; texts, lists and objects, and nothing else.
    Raises ValueError.

    >>> canonical({"seq": 1, "kind": "opened"})
    b'{"kind":"opened","seq":1}'
    """
    _check(value, _DEEPEST)
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode("utf-8")


def _check(value: object, depth: int) -> None:
    if depth < 0:
        raise ValueError("nested too deeply for a canonical form")
    if isinstance(value, dict):
        for key, inner in value.items():
            if not isinstance(key, str) or not key or not _KEY_CHARACTERS.issuperset(key):
                raise ValueError(f"{key!r} is not a key of a canonical form: use only a-z, 0-9 and _")
            _check(inner, depth - 1)
    elif isinstance(value, list | tuple):
        for inner in value:
            _check(inner, depth - 1)
    elif isinstance(value, bool) or not isinstance(value, int | str):
        raise ValueError(f"a canonical form cannot hold a {type(value).__name__}")
    elif isinstance(value, int) and abs(value) >= _MOST:
        raise ValueError(f"{value} is too large for a canonical form")


class LedgerAnchor(StrictModel):
    """The length and head of a ledger. `key`, its owner's public key, identifies it."""

    key: PublicKey
    seq: Sequence
    head: Digest = Field(description="Hash of the entry `seq`, and thereby of all earlier entries.")


class SentBroadcast(StrictModel):
    """The weights that the coordinator sent to a client in a round."""

    run: UUID
    round: Annotated[int, Field(ge=1, lt=2**53)]
    broadcast: Digest


class AnchorReceipt(StrictModel):
    """Proof that the coordinator has an anchor. `signature`: Ed25519 by `coordinator` of `receipt_message`."""

    client_id: ClientId
    seq: Sequence
    head: Digest
    at: Annotated[str, Field(max_length=40)] = Field(
        description="When the coordinator first received it, ISO 8601 in UTC."
    )
    coordinator: PublicKey
    signature: Signature
    sent: SentBroadcast | None = Field(
        default=None,
        exclude_if=lambda it: it is None,
        description="The broadcast of the round whose update carried the anchor: owners compare it with each other's.",
    )


def receipt_message(client_id: str, anchor: LedgerAnchor, at: str, sent: SentBroadcast | None) -> bytes:
    """Return what the coordinator signs for an anchor that it received at `at`, and for the broadcast that it sent."""
    body = {"at": at, "client": client_id, "head": anchor.head, "ledger": anchor.key, "seq": anchor.seq}
    if sent is not None:
        body |= sent.model_dump(mode="json")
    return b"fedssl/anchor/1\n" + canonical(body)
