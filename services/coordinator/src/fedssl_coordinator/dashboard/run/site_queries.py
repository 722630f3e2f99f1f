"""Reads how far the evaluations at the sites are, without their results."""

from datetime import timedelta
from typing import NamedTuple
from uuid import UUID

from sqlalchemy import and_, func, select
from sqlalchemy.orm import Session

from fedssl.protocol.states import SiteEvaluationState
from fedssl_coordinator.core.models import Client, SiteEvaluation
from fedssl_coordinator.federation.rounds.unseen import SEEN_SECONDS


class Progress(NamedTuple):
    """How many evaluations were offered, how many ended, and how many a client that is there still has to do."""

    offered: int
    ended: int
    awaited: int


def progress(session: Session, run_id: UUID) -> Progress:
    """Return how far the evaluations of a run's sites are."""
    is_seen = Client.last_seen_at > func.now() - timedelta(seconds=SEEN_SECONDS)
    is_awaited = and_(SiteEvaluation.state == SiteEvaluationState.OFFERED, is_seen)
    statement = (
        select(func.count(), func.count(SiteEvaluation.ended_at), func.count().filter(is_awaited))
        .join(Client, Client.id == SiteEvaluation.client_id)
        .where(SiteEvaluation.run_id == run_id)
    )
    return Progress._make(session.execute(statement).one())


def num_counted(session: Session, client_id: str) -> int:
    """Return how many evaluations the client has answered with counts, in the runs that are kept."""
    is_counted = SiteEvaluation.state == SiteEvaluationState.COMPLETED
    statement = select(func.count()).where(SiteEvaluation.client_id == client_id, is_counted)
    return session.scalar(statement) or 0
