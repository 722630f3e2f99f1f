"""Reads and writes uploads that have begun; their bytes are in the store."""

from collections.abc import Sequence
from datetime import datetime
from uuid import UUID, uuid4

from sqlalchemy import delete, select, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.orm import Session

from fedssl_coordinator.core.models import PartialUpload


def get(session: Session, upload_id: UUID) -> PartialUpload | None:
    return session.get(PartialUpload, upload_id)


def find(session: Session, token_id: UUID, assignment_id: UUID | None, digest: str) -> PartialUpload | None:
    """The one of an assignment, whatever it sends; without an assignment, the token's own of these bytes."""
    statement = select(PartialUpload).with_for_update()
    if assignment_id is not None:
        statement = statement.where(PartialUpload.assignment_id == assignment_id)
    else:
        statement = statement.where(
            PartialUpload.assignment_id.is_(None),
            PartialUpload.token_id == token_id,
            PartialUpload.digest == digest,
        )
    return session.scalars(statement).one_or_none()


def add(
    session: Session, token_id: UUID, assignment_id: UUID | None, digest: str, num_bytes: int
) -> PartialUpload | None:
    """None: somebody else began it at the same moment."""
    values = {"token_id": token_id, "assignment_id": assignment_id, "digest": digest, "num_bytes": num_bytes}
    statement = insert(PartialUpload).values(id=uuid4(), **values).on_conflict_do_nothing()
    return session.scalars(statement.returning(PartialUpload)).one_or_none()


def complete(session: Session, upload_id: UUID) -> None:
    session.execute(update(PartialUpload).where(PartialUpload.id == upload_id).values(is_complete=True))


def remove(session: Session, upload_id: UUID) -> None:
    session.execute(delete(PartialUpload).where(PartialUpload.id == upload_id))


def ids_begun_before(session: Session, moment: datetime) -> Sequence[UUID]:
    return session.scalars(select(PartialUpload.id).where(PartialUpload.created_at < moment)).all()


def unwatched(session: Session, upload_id: UUID) -> PartialUpload | None:
    """One that nobody continues until the transaction ends; None: somebody is looking at it, or it is gone."""
    return session.get(PartialUpload, upload_id, with_for_update={"skip_locked": True})


def all_ids(session: Session) -> set[UUID]:
    return set(session.scalars(select(PartialUpload.id)))
