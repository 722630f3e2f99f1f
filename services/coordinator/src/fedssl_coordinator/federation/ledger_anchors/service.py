"""Stores anchors and returns receipts for them. A contradiction is stored too, as evidence, and is an event."""

import functools
from datetime import UTC, datetime

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from sqlalchemy.orm import Session

from fedssl.protocol.ledger import AnchorReceipt, LedgerAnchor, SentBroadcast, receipt_message
from fedssl.protocol.views import LedgerAnchorView
from fedssl_coordinator.core.audit import record
from fedssl_coordinator.core.models import LedgerAnchor as Row
from fedssl_coordinator.core.quota import Quota
from fedssl_coordinator.core.secrets import key_of, signing_key
from fedssl_coordinator.federation.ledger_anchors import repository
from fedssl_coordinator.federation.ledger_anchors.repository import Extension

# Limits per client and hour, because both are kept permanently. An honest worker sends far fewer.
_MOST_ANCHORS = 10_000
_MOST_CONTRADICTIONS = 50


def view(row: Row) -> LedgerAnchorView:
    return LedgerAnchorView.model_validate(row, from_attributes=True)


def record_anchor(
    session: Session,
    client_id: str,
    anchor: LedgerAnchor | None,
    sent: SentBroadcast | None = None,
    extension: Extension | None = None,
) -> AnchorReceipt | None:
    """Store an anchor and return its receipt, or None if it contradicts an earlier one.

    `sent`: what the client received in the round whose update carries the anchor. The receipt confirms it too.
    `extension`: the anchor was stored by an earlier statement of the transaction, which holds the lock.

    A contradiction does not refuse the request that carried it: work continues, and an event reports it. A client that
    has sent too many anchors within the hour gets no receipt either. Call this last in a transaction: it takes a lock.
    """
    if anchor is None:
        return None
    if extension is None:
        repository.lock(session, client_id)
        # The ordinary case, in one statement. The lock keeps the quota as it is between the two calls.
        if has_room(client_id):
            extension = repository.extend(session, client_id, anchor)
    if extension is not None:
        _hour().take((client_id, True), _MOST_ANCHORS)
        return _receipt(key_of(extension.private_key), client_id, anchor, extension.at, sent)
    known = repository.of_entry(session, client_id, anchor)
    same = next((row for row in known if row.head == anchor.head), None)
    newest = repository.newest(session, client_id, anchor.key)
    continues = newest is not None and newest.seq <= anchor.seq and (same is not None or not known)
    most = _MOST_ANCHORS if continues else _MOST_CONTRADICTIONS
    if not (continues and same) and not _hour().take((client_id, continues), most):
        return None
    if newest is not None and anchor.seq < newest.seq:
        what = f"went back from entry {newest.seq} to {anchor.seq}: it was cut, or restored from a copy"
        _record_event(session, client_id, "ledger.went_back", what, anchor, newest)
    elif known and same is None:
        what = f"has another entry {anchor.seq} than before: it was rewritten, or restored from a copy"
        _record_event(session, client_id, "ledger.forked", what, anchor, known[0])
    else:
        row = same or _extend(session, client_id, anchor, is_new=newest is None)
        return _receipt(signing_key(session), client_id, anchor, row.at, sent) if row.is_consistent else None
    if same is None:
        repository.add(session, client_id, anchor, is_consistent=False)
    return None


def has_room(client_id: str) -> bool:
    """Return whether the client may send another anchor of a growing ledger within this hour."""
    return _hour().has_room((client_id, True), _MOST_ANCHORS)


@functools.cache
def _hour() -> Quota:
    return Quota(3600)


def _extend(session: Session, client_id: str, anchor: LedgerAnchor, *, is_new: bool) -> Row:
    """Store the anchor of a ledger that has grown, or that is new."""
    before = repository.newest(session, client_id) if is_new else None
    if before is not None:
        what = f"was replaced by another (key {anchor.key[:8]}): the worker's state folder is new"
        _record_event(session, client_id, "ledger.replaced", what, anchor, before)
    return repository.add(session, client_id, anchor, is_consistent=True)


def _receipt(
    key: Ed25519PrivateKey, client_id: str, anchor: LedgerAnchor, stored_at: datetime, sent: SentBroadcast | None
) -> AnchorReceipt:
    at = stored_at.astimezone(UTC).isoformat(timespec="microseconds")
    return AnchorReceipt(
        client_id=client_id,
        seq=anchor.seq,
        head=anchor.head,
        at=at,
        coordinator=key.public_key().public_bytes_raw().hex(),
        signature=key.sign(receipt_message(client_id, anchor, at, sent)).hex(),
        sent=sent,
    )


def _record_event(session: Session, client_id: str, kind: str, what: str, anchor: LedgerAnchor, known: Row) -> None:
    data = {"anchor": anchor.model_dump(), "known": {"key": known.key, "seq": known.seq, "head": known.head}}
    record(session, kind, f"{client_id}: its ledger {what}", client_id=client_id, data=data)
