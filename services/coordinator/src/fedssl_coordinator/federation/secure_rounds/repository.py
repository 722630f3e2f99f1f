"""Reads and writes secure rounds and the messages of their members."""

from collections.abc import Sequence
from datetime import datetime
from typing import Any, NamedTuple
from uuid import UUID

from sqlalchemy import Text, case, delete, func, literal, null, or_, select, update
from sqlalchemy.orm import Session, aliased

from fedssl.protocol.secure_work import SecurePhase
from fedssl.protocol.states import AssignmentState
from fedssl_coordinator.core.db import from_now
from fedssl_coordinator.core.models import Assignment, Json, Round, SecureMember, SecureRound

_CAN_ANSWER = or_(
    Assignment.state == AssignmentState.OFFERED,
    (Assignment.state == AssignmentState.LEASED) & (Assignment.lease_expires_at > func.now()),
)
_EMPTY = func.jsonb_build_object()


def add(session: Session, row: Round, num_words: int, facts: Json, clients: Sequence[str], seconds: float) -> None:
    """Add the protocol of a round that was just opened, in its first phase."""
    session.add(
        SecureRound(round_id=row.id, phase="keys", num_words=num_words, facts=facts, deadline=from_now(seconds))
    )
    session.flush()
    session.add_all(SecureMember(round_id=row.id, client_id=client) for client in clients)
    session.flush()


def get(session: Session, round_id: UUID) -> SecureRound | None:
    return session.get(SecureRound, round_id)


def of_round(session: Session, run_id: UUID, number: int) -> SecureRound:
    """Return the protocol of a secure round that exists."""
    statement = select(SecureRound).join(Round, Round.id == SecureRound.round_id)
    return session.scalars(statement.where(Round.run_id == run_id, Round.number == number)).one()


def locked(session: Session, round_id: UUID) -> SecureRound:
    """Return the protocol of a secure round, locked until the transaction ends: no message arrives meanwhile."""
    return session.get_one(SecureRound, round_id, with_for_update=True, populate_existing=True)


class Messages(NamedTuple):
    """The messages of a member, without the shares that are not needed.

    With 1,000 clients, the shares of all for all others take hundreds of megabytes.
    """

    client_id: str
    keys: Json | None
    shares: Json | None
    vectors: Json | None
    confirmations: Json | None
    reveals: Json | None


_NO_SHARES = case(
    (SecureMember.shares.is_(None), null()),
    else_=func.jsonb_build_object("boxes", _EMPTY, "pairs", _EMPTY, "commitments", _EMPTY),
)
_NO_REVEALED_SHARES = case(
    (SecureMember.reveals.is_(None), null()),
    else_=func.jsonb_build_object(
        "self_shares", _EMPTY, "mask_shares", _EMPTY, "unusable", SecureMember.reveals["unusable"]
    ),
)


def messages(session: Session, round_id: UUID, *, with_revealed: bool = False) -> list[Messages]:
    """Return the messages of all members as they are now, in name order: without shares, or with
    only those that were revealed and the pair secrets of lost clients."""
    if not with_revealed:
        return _messages(session, round_id, _NO_SHARES, _NO_REVEALED_SHARES)
    return _messages(session, round_id, _lost_pairs(round_id), SecureMember.reveals)


def _lost_pairs(round_id: UUID) -> Any:
    """Return the column of shares with only the pair secrets that a lost client has sent or received."""
    row, other = SecureMember, aliased(SecureMember)
    lost = select(other.client_id).where(other.round_id == round_id, other.vectors.is_(None))
    each = func.jsonb_each(row.shares["pairs"]).table_valued("key", "value")
    found = func.coalesce(func.jsonb_object_agg(each.c.key, each.c.value), _EMPTY)
    received = select(found).where(each.c.key.in_(lost))
    pairs = case((row.vectors.is_(None), row.shares["pairs"]), else_=received.correlate(row).scalar_subquery())
    return case(
        (row.shares.is_(None), null()),
        else_=func.jsonb_build_object("boxes", _EMPTY, "pairs", pairs, "commitments", _EMPTY),
    )


def messages_for(session: Session, round_id: UUID, client_id: str, *, with_shares: bool) -> list[Messages]:
    """Return the messages of all members as far as one client needs them, in name order.

    `with_shares`: the box and the commitments for that client. To find them, Postgres reads the shares for all other
    clients too.
    """
    row, its = SecureMember, literal(client_id, Text)
    parts: list[Any] = []
    for name in ("boxes", "pairs", "commitments"):
        parts += [name, func.jsonb_strip_nulls(func.jsonb_build_object(its, row.shares[name][client_id]))]
    shares = case((row.shares.is_(None), null()), else_=func.jsonb_build_object(*parts))
    reveals = case((row.client_id == client_id, row.reveals), else_=null())
    return _messages(session, round_id, shares if with_shares else _NO_SHARES, reveals)


def _messages(session: Session, round_id: UUID, shares: Any, reveals: Any) -> list[Messages]:
    row = SecureMember
    statement = select(row.client_id, row.keys, shares, row.vectors, row.confirmations, reveals)
    found = session.execute(statement.where(row.round_id == round_id).order_by(row.client_id))
    return [Messages(*each) for each in found]


def vectors(session: Session, round_id: UUID) -> dict[str, str]:
    """Return the digests of the masked vectors that have arrived, by client."""
    row = SecureMember
    statement = select(row.client_id, row.vectors["update"].astext).where(row.round_id == round_id)
    return dict(session.execute(statement.where(row.vectors.is_not(None))).all())


class Present(NamedTuple):
    """Which messages of a member have arrived: True, or None. It takes the place of the messages
    themselves, which have many megabytes in a round with 1,000 clients."""

    client_id: str
    keys: bool | None
    shares: bool | None
    vectors: bool | None
    confirmations: bool | None
    reveals: bool | None


def present(session: Session, round_id: UUID) -> list[Present]:
    """Return which messages of each member have arrived, in name order."""
    columns = [SecureMember.keys, SecureMember.shares, SecureMember.vectors, SecureMember.confirmations]
    columns.append(SecureMember.reveals)
    arrived = [func.nullif(column.is_not(None), False) for column in columns]
    statement = select(SecureMember.client_id, *arrived).where(SecureMember.round_id == round_id)
    return [Present(*row) for row in session.execute(statement.order_by(SecureMember.client_id))]


def of_rounds(session: Session, round_ids: Sequence[UUID]) -> Sequence[SecureRound]:
    """Return the protocols of those rounds that have one."""
    if not round_ids:
        return []
    return session.scalars(select(SecureRound).where(SecureRound.round_id.in_(round_ids))).all()


def member(session: Session, round_id: UUID, client_id: str) -> SecureMember | None:
    """Return one member as it is now."""
    statement = select(SecureMember).where(SecureMember.round_id == round_id, SecureMember.client_id == client_id)
    return session.scalars(statement.execution_options(populate_existing=True)).one_or_none()


def set_message(session: Session, round_id: UUID, client_id: str, phase: str, message: Json) -> None:
    """Store a member's message. The caller holds the round's lock."""
    mine = (SecureMember.round_id == round_id, SecureMember.client_id == client_id)
    session.execute(update(SecureMember).where(*mine).values({phase: message}))


def can_answer(session: Session, round_id: UUID) -> set[str]:
    """Return the clients that still hold a lease, or may still claim their assignment."""
    return set(session.scalars(select(Assignment.client_id).where(Assignment.round_id == round_id, _CAN_ANSWER)))


def is_overdue(session: Session, round_id: UUID) -> bool:
    """Return whether the phase's time is over, by the database's clock."""
    statement = select(SecureRound.deadline <= func.now()).where(SecureRound.round_id == round_id)
    return bool(session.scalar(statement))


def begin_phase(session: Session, row: SecureRound, phase: str, deadline: datetime | float) -> None:
    """Begin a phase that lasts until a moment, or for a number of seconds. The caller holds the round's lock."""
    until = from_now(deadline) if isinstance(deadline, float) else deadline
    values: dict[str, Any] = {"phase": phase, "deadline": until}
    session.execute(update(SecureRound).where(SecureRound.round_id == row.round_id).values(**values))
    session.expire(row)


def end(session: Session, row: SecureRound, phase: SecurePhase, facts: Json) -> None:
    """End the protocol, and delete every message of its members."""
    values: dict[str, Any] = {"phase": phase, "facts": facts}
    session.execute(update(SecureRound).where(SecureRound.round_id == row.round_id).values(**values))
    session.execute(delete(SecureMember).where(SecureMember.round_id == row.round_id))
    session.expire(row)
