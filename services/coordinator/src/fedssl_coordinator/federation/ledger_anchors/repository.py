"""Reads and writes anchors, which are only ever added to."""

from collections.abc import Sequence

from sqlalchemy import select, text
from sqlalchemy.orm import Session

from fedssl.protocol.ledger import LedgerAnchor
from fedssl_coordinator.core.models import LedgerAnchor as Row


def lock(session: Session, client_id: str) -> None:
    """Let this client's other anchors wait until the transaction ends."""
    key = {"key": f"fedssl/anchors/{client_id}"}
    session.execute(text("SELECT pg_advisory_xact_lock(hashtextextended(:key, 0))"), key)


def of_entry(session: Session, client_id: str, anchor: LedgerAnchor) -> Sequence[Row]:
    """Return the rows of the anchor's entry: one per hash that was claimed for it."""
    statement = select(Row).where(Row.client_id == client_id, Row.key == anchor.key, Row.seq == anchor.seq)
    return session.scalars(statement).all()


def newest(session: Session, client_id: str, key: str | None = None) -> Row | None:
    """Return the furthest consistent anchor of the ledger `key`, or, without a key, the client's newest one."""
    statement = select(Row).where(Row.client_id == client_id, Row.is_consistent)
    if key is None:
        return session.scalars(statement.order_by(Row.id.desc()).limit(1)).one_or_none()
    return session.scalars(statement.where(Row.key == key).order_by(Row.seq.desc()).limit(1)).one_or_none()


def add(session: Session, client_id: str, anchor: LedgerAnchor, *, is_consistent: bool) -> Row:
    row = Row(client_id=client_id, key=anchor.key, seq=anchor.seq, head=anchor.head, is_consistent=is_consistent)
    session.add(row)
    session.flush()
    return row


def after(session: Session, client_id: str, last_id: int, limit: int) -> Sequence[Row]:
    statement = select(Row).where(Row.client_id == client_id, Row.id > last_id).order_by(Row.id).limit(limit)
    return session.scalars(statement).all()
