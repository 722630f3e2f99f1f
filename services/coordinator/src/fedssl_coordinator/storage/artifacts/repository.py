"""Reads and writes the rows of artifacts; the bytes are in the store."""

from collections.abc import Sequence
from typing import Any
from uuid import UUID, uuid4

from sqlalchemy import BindParameter, bindparam, delete, exists, func, literal, or_, select, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.orm import Session

from fedssl.protocol.states import AssignmentState, RoundState, RunState, SiteEvaluationState
from fedssl_coordinator.core.models import (
    Artifact,
    Assignment,
    Client,
    DistillationJob,
    Evaluation,
    EvaluationDataset,
    PartialUpload,
    PublicDataset,
    RegisteredWeights,
    Round,
    Run,
    SecureRound,
    SiteEvaluation,
    Token,
    Upload,
    table_of,
)
from fedssl_coordinator.core.project_scope import UNRESTRICTED
from fedssl_coordinator.core.statements import Statement
from fedssl_coordinator.identity.tokens.repository import SeenWorker, is_workers


def add(session: Session, digest: str, num_bytes: int) -> None:
    """Record an artifact that was just stored, whether or not it was known before.

    Its row is locked against the collector until the transaction ends.
    """
    new = {"touched_at": func.now(), "collected_at": None}
    statement = insert(Artifact).values(digest=digest, num_bytes=num_bytes)
    session.execute(statement.on_conflict_do_update(index_elements=["digest"], set_=new))


def touch(session: Session, digest: str) -> bool:
    """Return whether the bytes of an artifact are stored. If they are, its retention period starts again."""
    statement = (
        update(Artifact)
        .where(Artifact.digest == digest, Artifact.collected_at.is_(None))
        .values(touched_at=func.now())
        .returning(Artifact.digest)
    )
    return session.execute(statement).scalar_one_or_none() is not None


def hold(session: Session, digest: str) -> bool:
    """Return whether the bytes of an artifact are stored. If they are, they stay until the transaction ends."""
    statement = select(Artifact.digest).where(Artifact.digest == digest, Artifact.collected_at.is_(None))
    return session.scalar(statement.with_for_update(read=True, key_share=True)) is not None


def remove(session: Session, digest: str) -> bool:
    """Delete an artifact's row; return whether there was one. Raises BrokenReference if something refers to it."""
    statement = delete(Artifact).where(Artifact.digest == digest).returning(Artifact.digest)
    return session.execute(statement).scalar_one_or_none() is not None


def assignment(session: Session, assignment_id: UUID) -> tuple[Assignment, Round, Run] | None:
    """Return an assignment with its round and its run."""
    statement = (
        select(Assignment, Round, Run)
        .join(Round, Round.id == Assignment.round_id)
        .join(Run, Run.id == Assignment.run_id)
        .where(Assignment.id == assignment_id)
    )
    found = session.execute(statement).one_or_none()
    return None if found is None else (found[0], found[1], found[2])


def locked_assignment(session: Session, assignment_id: UUID) -> Assignment | None:
    """Return an assignment, locked until the transaction ends, or None if it was deleted."""
    return session.get(Assignment, assignment_id, with_for_update={"key_share": True}, populate_existing=True)


def add_sent(session: Session, token_id: UUID, digest: str, num_bytes: int) -> None:
    """Record that a token's owner sent all bytes of an artifact, which is not the update of an assignment."""
    values = {"token_id": token_id, "digest": digest, "num_bytes": num_bytes, "is_complete": True}
    statement = insert(PartialUpload).values(id=uuid4(), **values)
    session.execute(
        statement.on_conflict_do_update(
            index_elements=["token_id", "digest"],
            index_where=PartialUpload.assignment_id.is_(None),
            set_={"is_complete": True, "created_at": func.now()},
        )
    )


def was_sent(session: Session, digest: str) -> bool:
    """Return whether a token that the caller may see has sent all bytes of an artifact recently."""
    statement = (
        select(PartialUpload.id)
        .join(Token, Token.id == PartialUpload.token_id)
        .where(PartialUpload.digest == digest, PartialUpload.assignment_id.is_(None), PartialUpload.is_complete)
    )
    return session.scalar(statement.limit(1)) is not None


def add_upload(session: Session, assignment_id: UUID, digest: str, most: int) -> bool:
    """Record that this assignment's worker sent the artifact and that it matches the plan.

    Returns False, and records nothing, if `most` others were sent for it. The caller has locked the assignment.
    """
    number = select(func.count()).select_from(Upload).where(Upload.assignment_id == assignment_id).scalar_subquery()
    new = select(literal(assignment_id), literal(digest)).where(number < most)
    statement = insert(Upload).from_select(["assignment_id", "digest"], new).on_conflict_do_nothing()
    is_new = session.scalar(statement.returning(Upload.digest)) is not None
    return is_new or is_uploaded(session, assignment_id, digest)


def is_uploaded(session: Session, assignment_id: UUID, digest: str) -> bool:
    return session.get(Upload, (assignment_id, digest)) is not None


def num_secure_words(session: Session, round_id: UUID) -> int:
    """Return the number of words of each client's masked vector in a secure round."""
    return session.get_one(SecureRound, round_id).num_words


def uploads_of(session: Session, assignment_id: UUID, digest: str) -> tuple[bool, int]:
    """Return whether this artifact was sent for an assignment, and how many different ones were."""
    is_there = func.coalesce(func.bool_or(Upload.digest == digest), False)
    statement = select(is_there, func.count()).where(Upload.assignment_id == assignment_id)
    found, number = session.execute(statement).one()
    return found, number


def is_known(session: Session, digest: str) -> bool:
    return session.get(Artifact, digest) is not None


def is_referred_to(session: Session, digest: str) -> bool:
    """Return whether a run or a data set that the caller may see refers to an artifact."""
    columns = (
        Run.initial_broadcast, Run.server_state, Run.broadcast, Round.broadcast, Assignment.update_digest,
        Run.initial_model, Run.model, Run.frozen, Round.model,
        Run.initial_weights, Evaluation.model, DistillationJob.checkpoint, PublicDataset.digest,
        EvaluationDataset.digest, RegisteredWeights.digest,
    )  # fmt: skip
    return any(session.scalar(select(column).where(column == digest).limit(1)) for column in columns)


def runs_in_need_of(session: Session, digest: str) -> Sequence[UUID | None]:
    """Return the unfinished runs of every project that cannot continue without an artifact."""
    current = select(Round.id).where(Round.run_id == Run.id, Round.state != RoundState.CLOSED)
    update_ = select(Assignment.id).join(Round, Round.id == Assignment.round_id)
    job = select(DistillationJob.id).where(DistillationJob.run_id == Run.id, DistillationJob.checkpoint == digest)
    needed = or_(
        Run.server_state == digest,
        Run.broadcast == digest,
        Run.frozen == digest,
        Run.spec["public_data"]["digest"].astext == digest,
        (Run.initial_weights == digest) & Run.plan.is_(None),
        current.where(Round.broadcast == digest).exists(),
        update_.where(
            Assignment.run_id == Run.id,
            Assignment.update_digest == digest,
            Assignment.state == AssignmentState.ACCEPTED,
            Round.state != RoundState.CLOSED,
        ).exists(),
        job.exists(),
    )
    statement = select(Run.id).where(Run.state != RunState.FINISHED, needed).order_by(Run.created_at, Run.id)
    return session.scalars(statement.execution_options(**{UNRESTRICTED: True})).all()


def is_broadcast_to(session: Session, digest: str, client_id: str) -> bool:
    """Return whether a round has sent these weights to this client, or they are the frozen ones of its run."""
    statement = select(
        exists(
            select(Assignment.id)
            .join(Round, Round.id == Assignment.round_id)
            .join(Run, Run.id == Assignment.run_id)
            .where(Assignment.client_id == client_id, or_(Round.broadcast == digest, Run.frozen == digest))
        )
    )
    return bool(session.scalar(statement))


def worker_of_artifact(digest: str, secret_hash: str) -> SeenWorker | None:
    """Return the worker with this token if it is valid, and `is_broadcast_to` or `is_public_for` is true of its client.

    One statement on tables, because each worker sends it in each round.
    """
    row = _WORKER_OF_ARTIFACT.alone({"secret": secret_hash, "wanted": digest})
    return None if row is None else SeenWorker(*row)


def _worker_of_artifact() -> Any:
    assignments, rounds, runs, sets = table_of(Assignment), table_of(Round), table_of(Run), table_of(PublicDataset)
    token, client = table_of(Token).c, table_of(Client).c
    wanted: BindParameter[str] = bindparam("wanted")
    own = select(literal(1)).where(assignments.c.client_id == client.id).correlate(table_of(Client))
    is_broadcast = own.where(rounds.c.id == assignments.c.round_id, rounds.c.broadcast == wanted)
    is_registered = select(literal(1)).where(sets.c.digest == wanted)
    is_public = own.where(
        assignments.c.leased_at.is_not(None),
        runs.c.id == assignments.c.run_id,
        runs.c.spec["public_data"]["digest"].astext == wanted,
        is_registered.exists(),
    )
    is_frozen = own.where(runs.c.id == assignments.c.run_id, runs.c.frozen == wanted)
    may_fetch = or_(is_broadcast.exists(), is_public.exists(), is_frozen.exists())
    return select(token.id, client.id).where(is_workers, may_fetch)


_WORKER_OF_ARTIFACT = Statement(_worker_of_artifact())


def is_evaluated_by(session: Session, digest: str, client_id: str) -> bool:
    """Return whether these weights are offered to this client for an evaluation."""
    offered = (SiteEvaluation.client_id == client_id) & (SiteEvaluation.state == SiteEvaluationState.OFFERED)
    found = select(SiteEvaluation.id).where(offered, SiteEvaluation.model == digest)
    return bool(session.scalar(select(exists(found))))


def is_public_for(session: Session, digest: str, client_id: str) -> bool:
    """Return whether these are the registered public images of a run in which this client has held an assignment."""
    statement = select(
        exists(
            select(Assignment.id)
            .join(Run, Run.id == Assignment.run_id)
            .where(
                Assignment.client_id == client_id,
                Assignment.leased_at.is_not(None),
                Run.spec["public_data"]["digest"].astext == digest,
                exists(select(PublicDataset.name).where(PublicDataset.digest == digest)),
            )
        )
    )
    return bool(session.scalar(statement))
