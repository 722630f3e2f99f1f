"""Reads and writes clients."""

from collections.abc import Sequence

from sqlalchemy import func, select, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.orm import Session

from fedssl.protocol.work import Register
from fedssl_coordinator.models import Client


def get(session: Session, client_id: str) -> Client | None:
    return session.get(Client, client_id)


def get_or_create(session: Session, client_id: str) -> Client:
    session.execute(insert(Client).values(id=client_id).on_conflict_do_nothing())
    return session.get_one(Client, client_id)


def register(session: Session, client_id: str, request: Register) -> None:
    """Keep what the worker says of itself; the first time decides `registered_at`."""
    values = request.model_dump(exclude={"protocol_version"})
    session.execute(
        update(Client)
        .where(Client.id == client_id)
        .values(**values, registered_at=func.coalesce(Client.registered_at, func.now()), last_seen_at=func.now())
    )


def seen(session: Session, client_id: str) -> None:
    session.execute(update(Client).where(Client.id == client_id).values(last_seen_at=func.now()))


def eligible(session: Session, names: Sequence[str] | None) -> list[str]:
    """Clients that have registered and are not revoked, in name order; of `names` only, where given.

    Whether one is alive at the moment does not count: it would make a run's result depend on luck.
    """
    statement = select(Client.id).where(Client.registered_at.is_not(None), Client.revoked_at.is_(None))
    if names is not None:
        statement = statement.where(Client.id.in_(names))
    return sorted(session.scalars(statement))


def by_name(session: Session, limit: int, after: str | None) -> Sequence[Client]:
    statement = select(Client).order_by(Client.id).limit(limit)
    if after is not None:
        statement = statement.where(Client.id > after)
    return session.scalars(statement).all()


def revoke(session: Session, client_id: str) -> Client:
    """Shut the client out; the row stays locked until the transaction ends, so that it claims nothing meanwhile."""
    statement = (
        update(Client)
        .where(Client.id == client_id)
        .values(revoked_at=func.coalesce(Client.revoked_at, func.now()))
        .returning(Client)
        .execution_options(populate_existing=True)
    )
    return session.scalars(statement).one()
