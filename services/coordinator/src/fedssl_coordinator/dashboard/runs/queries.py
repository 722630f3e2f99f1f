"""Reads what the list of runs shows, for a whole page of runs at once."""

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, NamedTuple, TypeVar
from uuid import UUID

from sqlalchemy import ColumnElement, Integer, String, bindparam, cast, func, or_, select, true, tuple_
from sqlalchemy.orm import Session, aliased

from fedssl.protocol.chance import Chance
from fedssl.protocol.states import AssignmentState, JobState, Outcome, RoundState, RunState
from fedssl_coordinator.core.db import among_named
from fedssl_coordinator.core.models import (
    Assignment,
    Client,
    DistillationJob,
    Evaluation,
    Round,
    Run,
)
from fedssl_coordinator.federation.rounds.repository import LIVE
from fedssl_coordinator.federation.rounds.unseen import SEEN_SECONDS

T = TypeVar("T")

RIBBON = 40
_CURVE = 200
_UNFINISHED = (JobState.QUEUED, JobState.RUNNING)

GROUPS: dict[str, tuple[str, ColumnElement[bool]]] = {
    "all": ("All", true()),
    "active": ("Active", Run.state != RunState.FINISHED),
    "finished": ("Finished", (Run.state == RunState.FINISHED) & (Run.outcome != Outcome.FAILED)),
    "failed": ("Failed", Run.outcome == Outcome.FAILED),
}
"""The filters of the list: each has a name for people, and a condition for the runs in it."""


class Score(NamedTuple):
    """The results of one round's encoder. Scores with different `judge` cannot be compared.

    `chance` is None if an older version evaluated.
    """

    round_number: int
    results: dict[str, float | None]
    dataset: str
    judge: str
    chance: Chance | None


class Missing(NamedTuple):
    """A client that an open round waits for."""

    client_id: str
    state: str
    last_seen_at: datetime | None
    is_seen: bool
    progress: dict[str, Any] | None


def group_counts(session: Session) -> dict[str, int]:
    """Return the number of runs in each group."""
    counts = [func.count().filter(condition) for _, condition in GROUPS.values()]
    return dict(zip(GROUPS, session.execute(select(*counts).select_from(Run)).one(), strict=True))


def num_paused(session: Session) -> int:
    return session.scalar(select(func.count()).where(Run.state == RunState.PAUSED)) or 0


def page(session: Session, limit: int, before: tuple[datetime, UUID] | None, group: str, text: str) -> Sequence[Run]:
    """Return the runs of a group whose name, method, encoder or state contains `text`, newest first."""
    statement = select(Run).where(GROUPS[group][1]).order_by(Run.created_at.desc(), Run.id.desc()).limit(limit)
    if text:
        encoder = Run.spec["model"]["encoder"]["name"].astext
        tags = cast(Run.tags, String)
        places = (Run.name, Run.method, encoder, Run.state, Run.outcome, Run.reason, cast(Run.id, String), tags)
        found = [func.lower(func.coalesce(place, "")).contains(text.lower(), autoescape=True) for place in places]
        statement = statement.where(or_(*found))
    if before is not None:
        statement = statement.where(tuple_(Run.created_at, Run.id) < before)
    return session.scalars(statement).all()


_newest = (
    select(Round)
    .where(Round.run_id == Run.id)
    .order_by(Round.number.desc())
    .limit(bindparam("limit", type_=Integer))
    .lateral("newest")
)
_last_round = aliased(Round, _newest)
_LAST_ROUNDS = (
    select(_last_round)
    .select_from(Run)
    .join(_newest, true())
    .where(among_named(Run.id, "runs"))
    .order_by(_last_round.number)
)


def last_rounds(session: Session, run_ids: Sequence[UUID], limit: int = RIBBON) -> dict[UUID, list[Round]]:
    """Return the newest rounds of each run, oldest first."""
    found: defaultdict[UUID, list[Round]] = defaultdict(list)
    for found_row in session.scalars(_LAST_ROUNDS, {"runs": run_ids, "limit": limit}):
        found[found_row.run_id].append(found_row)
    return found


def missing(session: Session, round_ids: Sequence[UUID], limit: int = 500) -> dict[UUID, list[Missing]]:
    """Return the clients that have not delivered yet in open rounds."""
    seen = func.coalesce(Client.last_seen_at > func.now() - timedelta(seconds=SEEN_SECONDS), False)
    statement = (
        select(
            Assignment.round_id,
            Assignment.client_id,
            Assignment.state,
            Client.last_seen_at,
            seen | func.coalesce(Assignment.lease_expires_at > func.now(), False),
            Assignment.progress,
        )
        .join(Client, Client.id == Assignment.client_id)
        .where(Assignment.round_id.in_(round_ids), Assignment.state.in_(LIVE))
        .order_by(Assignment.client_id)
        .limit(limit)
    )
    found: defaultdict[UUID, list[Missing]] = defaultdict(list)
    for row in session.execute(statement):
        found[row[0]].append(Missing._make(row[1:]))
    return found


def scores(session: Session, run_ids: Sequence[UUID]) -> dict[UUID, list[Score]]:
    """Return the results of evaluations by round, for one data set and one setting.

    The setting is the spec's own if an evaluation used it, else the newest evaluation's. Measures of one round are
    combined; if two have the same name, the first counts.
    """
    columns = (Evaluation.run_id, Evaluation.round_number, Evaluation.results, Evaluation.dataset)
    statement = (
        select(*columns, Evaluation.dataset_digest, Evaluation.config, Evaluation.chance)
        .where(Evaluation.run_id.in_(run_ids), Evaluation.state == JobState.COMPLETED)
        .order_by(Evaluation.created_at, Evaluation.id)
    )
    found: defaultdict[UUID, list[Score]] = defaultdict(list)
    for run_id, number, results, dataset, digest, config, chance in session.execute(statement):
        judge = f"{digest} {_setting(config)}"
        known = None if chance is None else Chance(**chance)
        found[run_id].append(Score(number, results or {}, dataset, judge, known))
    asked = select(Run.id, Run.spec["evaluation"]).where(Run.id.in_(found))
    own = {run_id: _setting(config or {}) for run_id, config in session.execute(asked)}
    return {run_id: _of_one_judge(rows, own[run_id]) for run_id, rows in found.items()}


def _setting(config: Mapping[str, Any]) -> str:
    """Return the settings that results must share to be comparable: without interval, measures, map and sites."""
    but = ("every", "measures", "embedding_map", "at", "sites")
    return json.dumps({name: value for name, value in config.items() if name not in but}, sort_keys=True)


def _of_one_judge(rows: Sequence[Score], own: str) -> list[Score]:
    """Return the scores by round. `rows` are in the order of the requests."""
    judge = next((row.judge for row in reversed(rows) if row.judge.endswith(f" {own}")), rows[-1].judge)
    merged: dict[int, Score] = {}
    for row in (row for row in rows if row.judge == judge):
        before = merged.get(row.round_number)
        merged[row.round_number] = row._replace(results={**row.results, **(before.results if before else {})})
    return [merged[number] for number in sorted(merged)]


def drawn(scores: list[Score]) -> list[Score]:
    """Return the scores that a chart draws."""
    return thinned(scores, _CURVE)


def thinned(rows: list[T], most: int) -> list[T]:
    """Return about `most` rows, including the first and the last."""
    step = max(1, -(-len(rows) // most))
    return rows[: len(rows) - 1 : step] + rows[-1:]


def jobs(session: Session, run_ids: Sequence[UUID]) -> dict[UUID, DistillationJob]:
    """Return the unfinished distillation of each run that has one."""
    statement = select(DistillationJob).where(
        DistillationJob.run_id.in_(run_ids), DistillationJob.state.in_(_UNFINISHED)
    )
    return {job.run_id: job for job in session.scalars(statement)}


class Facts(NamedTuple):
    """Figures of the whole federation."""

    clients: int
    online: int
    leased: int
    offered: int
    distillations: int
    evaluations: int


def facts(session: Session) -> Facts:
    """Return the figures. Every count uses an index, so it stays fast however many runs there have been."""
    recently = Client.last_seen_at > func.now() - timedelta(seconds=SEEN_SECONDS)
    leased = Assignment.state == AssignmentState.LEASED
    holds_lease = select(Assignment.id).where(
        Assignment.client_id == Client.id, leased, Assignment.lease_expires_at > func.now()
    )
    known = Client.registered_at.is_not(None) & Client.revoked_at.is_(None)
    clients, online = session.execute(
        select(func.count(), func.count().filter(recently | holds_lease.exists())).select_from(Client).where(known)
    ).one()
    in_progress = (
        select(func.count().filter(leased), func.count().filter(Assignment.state == AssignmentState.OFFERED))
        .join(Round, Round.id == Assignment.round_id)
        .where(Round.state == RoundState.OPEN, Assignment.state.in_(LIVE))
    )
    counts = [
        session.scalar(select(func.count()).select_from(table).where(table.state.in_(_UNFINISHED))) or 0
        for table in (DistillationJob, Evaluation)
    ]
    return Facts(clients, online, *session.execute(in_progress).one(), *counts)


def num_eligible(session: Session) -> dict[str, int]:
    """Return per project the number of clients that a run without a list of its own can use."""
    known = Client.registered_at.is_not(None) & Client.revoked_at.is_(None)
    counts = select(Client.project, func.count().label("number")).where(known).group_by(Client.project)
    return {row.project: row.number for row in session.execute(counts)}
