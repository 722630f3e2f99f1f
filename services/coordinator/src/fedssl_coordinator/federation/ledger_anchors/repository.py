"""Reads and adds anchors, which are never changed or removed."""

from collections.abc import Sequence
from datetime import datetime
from typing import Any, NamedTuple

from sqlalchemy import BigInteger, ColumnElement, Select, Text, bindparam, cast, func, literal, select, text, true
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.orm import Session

from fedssl.protocol.ledger import LedgerAnchor
from fedssl_coordinator.core.models import LedgerAnchor as Row
from fedssl_coordinator.core.models import SigningKey, table_of
from fedssl_coordinator.core.statements import Statement

_PREFIX = "fedssl/anchors/"
_LOCK = Statement(text("SELECT pg_advisory_xact_lock(hashtextextended(:key, 0))"))


def taken_lock(client_id: ColumnElement[str]) -> ColumnElement[None]:
    """Return the SQL expression that does the same as `lock`."""
    return func.pg_advisory_xact_lock(func.hashtextextended(literal(_PREFIX).concat(client_id), 0))


def lock(session: Session, client_id: str) -> None:
    """Lock this client's anchors until the transaction ends: others wait."""
    _LOCK.all(session, {"key": _PREFIX + client_id})


class Extension(NamedTuple):
    """When an anchor was stored, and the private key with which its receipt is signed."""

    at: datetime
    private_key: str


def extend(session: Session, client_id: str, anchor: LedgerAnchor) -> Extension | None:
    """Store the anchor of a known ledger that has grown, in one statement. The caller holds the client's lock.

    Returns None, and stores nothing, if the ledger is new, has not grown, or if there is no signing key yet.
    """
    row = _EXTEND.one_or_none(session, values_of(client_id, anchor))
    return None if row is None else Extension(*row)


def values_of(client_id: str, anchor: LedgerAnchor) -> dict[str, object]:
    """Return the parameters of `extension`."""
    return {"client": client_id, **anchor.model_dump()}


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


def extension() -> Select[Any]:
    """Build the statement of `extend`, once, and on tables: on a mapped class it takes three times as long."""
    anchors, keys = table_of(Row), table_of(SigningKey)
    known = anchors.c
    client, key, head = (cast(bindparam(name), Text) for name in ("client", "key", "head"))
    seq = cast(bindparam("seq"), BigInteger)
    newest = (
        select(known.seq)
        .where(known.client_id == client, known.key == key, known.is_consistent)
        .order_by(known.seq.desc())
        .limit(1)
        .scalar_subquery()
    )
    of_entry = select(known.id).where(known.client_id == client, known.key == key, known.seq == seq).exists()
    new = select(client, key, seq, head, literal(True)).select_from(keys).where(newest < seq, ~of_entry)
    added = (
        insert(anchors)
        .from_select(["client_id", "key", "seq", "head", "is_consistent"], new)
        .returning(known.at)
        .cte("added")
    )
    return select(added.c.at, keys.c.private_key).select_from(added.join(keys, true()))


_EXTEND = Statement(extension())
