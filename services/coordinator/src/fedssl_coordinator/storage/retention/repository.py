"""Finds the artifacts that are needed, from Postgres only, and records those whose bytes were removed.

An artifact is referred to by every column with a foreign key to it, so a new table keeps its artifacts without a change
here. That is also true of the tables and columns of a newer version, which this one meets during an upgrade and after a
rollback: Postgres is asked which columns there are. Only the references in `_conditions` expire.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

from sqlalchemy import (
    ColumnClause,
    ColumnElement,
    Float,
    case,
    column,
    delete,
    func,
    or_,
    select,
    table,
    text,
    true,
    update,
)
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.orm import InstrumentedAttribute, Session, aliased

from fedssl.protocol.states import AssignmentState, JobState, RoundState, SiteEvaluationState
from fedssl_coordinator.core.models import (
    Artifact,
    Assignment,
    Base,
    Evaluation,
    Round,
    SecureRound,
    SiteEvaluation,
    Upload,
)

UPDATE, BROADCAST, UNREFERENCED = "update", "broadcast", "unreferenced"
AnyColumn = InstrumentedAttribute[Any] | ColumnClause[Any]
_DELIVERING = (AssignmentState.LEASED, AssignmentState.SUBMITTED)
_REFERENCES = text(
    "SELECT relname, attname FROM pg_constraint JOIN pg_class ON pg_class.oid = conrelid "
    "JOIN pg_attribute ON attrelid = conrelid AND attnum = ANY (conkey) "
    "WHERE contype = 'f' AND confrelid = 'artifacts'::regclass ORDER BY relname, attname"
)


@dataclass(frozen=True, slots=True)
class RetentionPeriods:
    """For how many seconds artifacts that no run needs are kept; see the settings of the same names."""

    updates: float
    broadcasts: float
    unreferenced: float


@dataclass(frozen=True, slots=True)
class RemovableArtifact:
    """An artifact that may be removed. `kind`: what it was; `run_id`: a run that it belonged to."""

    digest: str
    num_bytes: int
    kind: str
    run_id: UUID | None


def removable(session: Session, keep: RetentionPeriods) -> Sequence[RemovableArtifact]:
    """Return all artifacts that may be removed, ordered by run and kind."""
    kind = case((_names(Assignment.update_digest) | _names(Upload.digest), UPDATE), else_=UNREFERENCED)
    kind = case((_names(Round.broadcast) | _names(Round.model), BROADCAST), else_=kind)
    uploaded = select(Assignment.run_id).join(Upload).where(Upload.digest == Artifact.digest).limit(1)
    owners = [
        select(table.run_id).where(column == Artifact.digest).limit(1).scalar_subquery()
        for table, column in (
            (Round, Round.broadcast),
            (Round, Round.model),
            (Assignment, Assignment.update_digest),
        )
    ]
    run_id = func.coalesce(*owners, uploaded.scalar_subquery())
    found = select(Artifact.digest, Artifact.num_bytes, kind, run_id).where(_may_go(session, keep))
    rows = [RemovableArtifact(*row) for row in session.execute(found)]
    return sorted(rows, key=lambda row: (str(row.run_id), row.kind, row.digest))


def locked_removable(session: Session, digests: Sequence[str], keep: RetentionPeriods) -> set[str]:
    """Return those of the artifacts that may still be removed, with their rows locked until the transaction ends.

    Until then no row can begin to refer to them, and no process can record that it has stored them again.
    """
    # Two statements: the second sees everything that was committed before the locks were acquired.
    locking = select(Artifact.digest).where(Artifact.digest.in_(digests)).order_by(Artifact.digest)
    locked = session.scalars(locking.with_for_update(skip_locked=True)).all()
    return set(session.scalars(select(Artifact.digest).where(Artifact.digest.in_(locked), _may_go(session, keep))))


def forget(session: Session, digests: set[str]) -> None:
    """Delete the rows of artifacts whose bytes were removed. A row that is still referred to records the removal."""
    these, is_referenced = Artifact.digest.in_(digests), _is_referenced(references(session))
    unsynchronised = {"synchronize_session": False}
    session.execute(delete(Artifact).where(these, ~is_referenced), execution_options=unsynchronised)
    session.execute(update(Artifact).where(these).values(collected_at=func.now()), execution_options=unsynchronised)


def unknown(session: Session, digests: Sequence[str]) -> set[str]:
    """Return those of the digests that are not stored according to the database."""
    known = select(Artifact.digest).where(Artifact.digest.in_(digests), Artifact.collected_at.is_(None))
    return set(digests) - set(session.scalars(known))


def adopt(session: Session, digest: str, num_bytes: int, age_seconds: float) -> None:
    """Add a row, of the same age, for a file that has none, so that it expires like any other artifact."""
    since = func.now() - timedelta(seconds=age_seconds)
    statement = insert(Artifact).values(digest=digest, num_bytes=num_bytes, touched_at=since)
    revived = {"touched_at": since, "collected_at": None}
    statement = statement.on_conflict_do_update(
        index_elements=["digest"], set_=revived, where=Artifact.collected_at.is_not(None)
    )
    session.execute(statement)


def needed(session: Session, keep: RetentionPeriods) -> list[tuple[str, int]]:
    """Return the digest and the size in bytes of every artifact that must be in the store."""
    is_kept = Artifact.collected_at.is_(None) & _is_needed(references(session), keep)
    statement = select(Artifact.digest, Artifact.num_bytes).where(is_kept).order_by(Artifact.digest)
    return [(digest, num_bytes) for digest, num_bytes in session.execute(statement)]


def is_needed(session: Session, digest: str, keep: RetentionPeriods) -> bool:
    statement = select(Artifact.digest).where(Artifact.digest == digest, _is_needed(references(session), keep))
    return session.scalar(statement) is not None


def _may_go(session: Session, keep: RetentionPeriods) -> ColumnElement[bool]:
    columns, is_old = references(session), Artifact.touched_at <= _ago(keep.unreferenced)
    return Artifact.collected_at.is_(None) & ~_is_needed(columns, keep) & or_(_is_referenced(columns), is_old)


def _is_needed(columns: Sequence[ColumnClause[Any]], keep: RetentionPeriods) -> ColumnElement[bool]:
    conditions = _conditions(keep)
    return or_(*(_names(column, conditions.get(column, true())) for column in columns))


def _is_referenced(columns: Sequence[ColumnClause[Any]]) -> ColumnElement[bool]:
    return or_(*(_names(column) for column in columns))


def references(session: Session) -> list[ColumnClause[Any]]:
    """Return every column of the database that refers to an artifact."""
    return [_column(*names) for names in session.execute(_REFERENCES)]


def _column(table_name: str, name: str) -> ColumnClause[Any]:
    """Return a column of the models, or of a table or with a name that they lack."""
    known = Base.metadata.tables.get(table_name)
    return known.c[name] if known is not None and name in known.c else table(table_name, column(name)).c[name]


def _conditions(keep: RetentionPeriods) -> dict[ColumnClause[Any], ColumnElement[bool]]:
    """Return the conditions under which references need the bytes. References that are not listed always do."""
    by_round = {
        Assignment.update_digest: _round_is_of(Assignment.round_id, keep.updates) & ~_is_masked(Assignment.round_id),
        Round.broadcast: _is_recent(keep.broadcasts),
        Round.model: _is_recent(keep.broadcasts),
    }
    sent = select(Assignment.id).where(Assignment.id == Upload.assignment_id)
    delivering = sent.where(Assignment.state.in_(_DELIVERING))
    # A masked vector may be in the sum of its round even if its client has declined or was revoked since.
    summed = sent.join(SecureRound, SecureRound.round_id == Assignment.round_id).join(
        Round, (Round.id == Assignment.round_id) & (Round.state != RoundState.CLOSED)
    )
    unfinished = Evaluation.state.in_((JobState.QUEUED, JobState.RUNNING))
    awaited = (SiteEvaluation.state == SiteEvaluationState.OFFERED) & (
        SiteEvaluation.created_at > _ago(keep.broadcasts)
    )
    others = {
        Upload.digest: delivering.exists() | summed.exists(),
        Evaluation.model: unfinished | _is_best(),
        SiteEvaluation.model: awaited,
    }
    return {column.property.columns[0]: condition for column, condition in (by_round | others).items()}


def _round_is_of(round_id: InstrumentedAttribute[UUID], seconds: float) -> ColumnElement[bool]:
    return select(Round.id).where(Round.id == round_id, _is_recent(seconds)).exists()


def _is_masked(round_id: InstrumentedAttribute[UUID]) -> ColumnElement[bool]:
    """Return the condition that the round is closed and its updates are masked vectors, which are deleted at once."""
    secure = select(SecureRound.round_id).join(Round, Round.id == SecureRound.round_id)
    return secure.where(SecureRound.round_id == round_id, Round.state == RoundState.CLOSED).exists()


def _is_recent(seconds: float) -> ColumnElement[bool]:
    """Return the condition that the round is still open, or was closed less than `seconds` ago."""
    return (Round.state != RoundState.CLOSED) | (Round.closed_at > _ago(seconds))


def _is_best() -> ColumnElement[bool]:
    """Return the condition that the evaluation has a result, and no other of the run on this data set a better one."""
    other = aliased(Evaluation)
    better = select(other.id).where(
        other.run_id == Evaluation.run_id,
        other.dataset_digest == Evaluation.dataset_digest,
        _score(other) > _score(Evaluation),
    )
    return _score(Evaluation).is_not(None) & ~better.exists()


def _score(evaluation: type[Evaluation]) -> ColumnElement[float]:
    probe, knn = (evaluation.results[name].astext.cast(Float) for name in ("probe", "knn"))
    return func.coalesce(probe, knn)


def _names(column: AnyColumn, condition: ColumnElement[bool] | None = None) -> ColumnElement[bool]:
    """Return the condition that the column of some row has the artifact's digest, and `condition` holds for it."""
    statement = select(column).where(column == Artifact.digest)
    return (statement if condition is None else statement.where(condition)).exists()


def _ago(seconds: float) -> ColumnElement[datetime]:
    return func.now() - timedelta(seconds=seconds)
