"""Reads and writes evaluations at the sites."""

from collections.abc import Sequence
from uuid import UUID

from sqlalchemy import func, select
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.orm import Session, defer

from fedssl.protocol.states import SiteEvaluationState
from fedssl_coordinator.core.db import among
from fedssl_coordinator.core.models import Client, Json, Run, SiteEvaluation

_is_offered = SiteEvaluation.state == SiteEvaluationState.OFFERED


def offer(
    session: Session,
    run_id: UUID,
    round_number: int,
    model: str,
    client_ids: Sequence[str],
    head_of: str | None = None,
) -> Sequence[str]:
    """Offer a round's evaluation, or that of one site's classifier, to clients.

    Returns those to which it was not offered before.
    """
    shared = {
        "run_id": run_id,
        "round_number": round_number,
        "model": model,
        "state": SiteEvaluationState.OFFERED,
        "head_of": head_of,
    }
    statement = (
        insert(SiteEvaluation)
        .values([{**shared, "client_id": client_id} for client_id in client_ids])
        .on_conflict_do_nothing(index_elements=["run_id", "round_number", "client_id", "head_of"])
        .returning(SiteEvaluation.client_id)
    )
    return sorted(session.scalars(statement))


def oldest_offered(session: Session, client_id: str) -> tuple[SiteEvaluation, Run] | None:
    """Return the evaluation that the client should do next, locked, and its run."""
    statement = (
        select(SiteEvaluation, Run)
        .join(Run, Run.id == SiteEvaluation.run_id)
        .where(SiteEvaluation.client_id == client_id, _is_offered)
        .order_by(SiteEvaluation.created_at, SiteEvaluation.id)
        .limit(1)
        .with_for_update(of=SiteEvaluation, key_share=True, skip_locked=True)
    )
    found = session.execute(statement).one_or_none()
    return None if found is None else (found[0], found[1])


def offered_to(session: Session, client_ids: Sequence[str]) -> set[str]:
    """Return which of the clients have an evaluation to do."""
    statement = select(SiteEvaluation.client_id).where(among(SiteEvaluation.client_id, client_ids), _is_offered)
    return set(session.scalars(statement.distinct()))


def locked(session: Session, evaluation_id: UUID, client_id: str) -> tuple[SiteEvaluation, Run, Client] | None:
    """Return this client's evaluation, locked until the transaction ends, with its run and the client."""
    statement = (
        select(SiteEvaluation, Run, Client)
        .join(Run, Run.id == SiteEvaluation.run_id)
        .join(Client, Client.id == SiteEvaluation.client_id)
        .where(SiteEvaluation.id == evaluation_id, SiteEvaluation.client_id == client_id)
        .with_for_update(of=SiteEvaluation, key_share=True)
        .execution_options(populate_existing=True)
    )
    found = session.execute(statement).one_or_none()
    return None if found is None else (found[0], found[1], found[2])


def locked_offered(session: Session, client_id: str) -> Sequence[SiteEvaluation]:
    """Return all evaluations that are offered to a client, locked."""
    statement = select(SiteEvaluation).where(SiteEvaluation.client_id == client_id, _is_offered)
    return session.scalars(statement.order_by(SiteEvaluation.id).with_for_update(key_share=True)).all()


def locked_without_counts(
    session: Session, run_id: UUID, round_number: int, client_ids: Sequence[str]
) -> Sequence[SiteEvaluation]:
    """Return the evaluations of a round that these clients refused or missed, locked."""
    unanswered = (SiteEvaluationState.REFUSED, SiteEvaluationState.EXPIRED)
    statement = (
        select(SiteEvaluation)
        .where(SiteEvaluation.run_id == run_id, SiteEvaluation.round_number == round_number)
        .where(among(SiteEvaluation.client_id, client_ids), SiteEvaluation.state.in_(unanswered))
        .order_by(SiteEvaluation.id)
        .with_for_update(key_share=True)
    )
    return session.scalars(statement).all()


def rounds(session: Session, run_id: UUID, limit: int, after: int | None) -> Sequence[int]:
    """Return the numbers of the rounds that sites were to evaluate, in order."""
    number = SiteEvaluation.round_number
    statement = select(number).where(SiteEvaluation.run_id == run_id).distinct().order_by(number).limit(limit)
    return session.scalars(statement if after is None else statement.where(number > after)).all()


def newest_rounds(session: Session, run_id: UUID, limit: int) -> Sequence[int]:
    """Return the numbers of the last rounds that sites were to evaluate, newest first."""
    number = SiteEvaluation.round_number
    statement = select(number).where(SiteEvaluation.run_id == run_id).distinct().order_by(number.desc()).limit(limit)
    return session.scalars(statement).all()


def of_round(session: Session, run_id: UUID, round_number: int) -> Sequence[SiteEvaluation]:
    """Return a round's evaluations of its encoder, by client, without the sites' classifiers."""
    statement = (
        select(SiteEvaluation)
        .options(defer(SiteEvaluation.head))
        .where(SiteEvaluation.run_id == run_id, SiteEvaluation.round_number == round_number)
        .where(SiteEvaluation.head_of.is_(None))
        .order_by(SiteEvaluation.client_id)
    )
    return session.scalars(statement).all()


def newest_cross_site(session: Session, run_id: UUID) -> int | None:
    """Return the last round with evaluations of sites' classifiers, or None if there is none."""
    statement = select(func.max(SiteEvaluation.round_number)).where(
        SiteEvaluation.run_id == run_id, SiteEvaluation.head_of.is_not(None)
    )
    return session.scalar(statement)


def cross_site(session: Session, run_id: UUID, round_number: int) -> Sequence[SiteEvaluation]:
    """Return a round's evaluations of sites' classifiers by other sites, by both names."""
    statement = (
        select(SiteEvaluation)
        .where(SiteEvaluation.run_id == run_id, SiteEvaluation.round_number == round_number)
        .where(SiteEvaluation.head_of.is_not(None))
        .order_by(SiteEvaluation.head_of, SiteEvaluation.client_id)
    )
    return session.scalars(statement).all()


def lock_round(session: Session, run_id: UUID, round_number: int) -> None:
    """Lock the pairing of this round's sites until the transaction ends: others wait."""
    key = f"site_evaluations/{run_id}/{round_number}"
    session.execute(select(func.pg_advisory_xact_lock(func.hashtextextended(key, 0))))


def completed(session: Session, run_id: UUID, round_number: int) -> dict[str, bool]:
    """Return the sites that have counts of a round, by name, and whether each has sent a classifier."""
    statement = select(SiteEvaluation.client_id, SiteEvaluation.head.is_not(None)).where(
        SiteEvaluation.run_id == run_id,
        SiteEvaluation.round_number == round_number,
        SiteEvaluation.head_of.is_(None),
        SiteEvaluation.state == SiteEvaluationState.COMPLETED,
    )
    return dict(sorted((name, has_head) for name, has_head in session.execute(statement)))


def head(session: Session, row: SiteEvaluation) -> Json:
    """Return the classifier that an evaluation is about."""
    statement = select(SiteEvaluation.head).where(
        SiteEvaluation.run_id == row.run_id,
        SiteEvaluation.round_number == row.round_number,
        SiteEvaluation.client_id == row.head_of,
        SiteEvaluation.head_of.is_(None),
    )
    found = session.scalars(statement).one()
    assert found is not None, "only sites that have sent one are paired, and it stays"
    return found
