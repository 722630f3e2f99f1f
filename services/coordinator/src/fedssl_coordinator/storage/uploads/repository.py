"""Reads and writes the rows of unfinished uploads; their bytes are in the store."""

from collections.abc import Sequence
from datetime import datetime
from uuid import UUID, uuid4

from sqlalchemy import delete, func, select, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.orm import Session

from fedssl_coordinator.core.models import PartialUpload


def get(session: Session, upload_id: UUID) -> PartialUpload | None:
    return session.get(PartialUpload, upload_id)


def find(session: Session, token_id: UUID, assignment_id: UUID | None, digest: str) -> PartialUpload | None:
    """Return the upload of an assignment, whatever its digest, or without one the token's upload of the digest.

    Its row is locked until the transaction ends.
    """
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
    """Add an upload, or return None if another request has added the same one at this moment."""
    values = {"token_id": token_id, "assignment_id": assignment_id, "digest": digest, "num_bytes": num_bytes}
    statement = insert(PartialUpload).values(id=uuid4(), **values).on_conflict_do_nothing()
    return session.scalars(statement.returning(PartialUpload)).one_or_none()


def complete(session: Session, upload_id: UUID) -> None:
    """Record that an upload has become an artifact. It expires as if it had been announced now."""
    values = {"is_complete": True, "created_at": func.now()}
    session.execute(update(PartialUpload).where(PartialUpload.id == upload_id).values(**values))


def remove(session: Session, upload_id: UUID) -> None:
    session.execute(delete(PartialUpload).where(PartialUpload.id == upload_id))


def ids_begun_before(session: Session, moment: datetime) -> Sequence[UUID]:
    return session.scalars(select(PartialUpload.id).where(PartialUpload.created_at < moment)).all()


def locked_if_idle(session: Session, upload_id: UUID) -> PartialUpload | None:
    """Return an upload, locked until the transaction ends, or None if another transaction holds it or it is deleted."""
    return session.get(PartialUpload, upload_id, with_for_update={"skip_locked": True})


def all_ids(session: Session) -> set[UUID]:
    return set(session.scalars(select(PartialUpload.id)))
