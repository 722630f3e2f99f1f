"""The state machines, and the only way to change a state.

A change is a conditional UPDATE that returns whether this caller made it, with its event in the same transaction.
"""

from types import MappingProxyType
from typing import Any, NamedTuple
from uuid import UUID

from sqlalchemy import update
from sqlalchemy.orm import Session

from fedssl.protocol.states import AssignmentState as A
from fedssl.protocol.states import JobState as J
from fedssl.protocol.states import RoundState as R
from fedssl.protocol.states import RunState as S
from fedssl.protocol.states import SiteEvaluationState as E
from fedssl_coordinator.core.audit import record
from fedssl_coordinator.core.models import Assignment, DistillationJob, Evaluation, Job, Round, Run, SiteEvaluation

Row = Run | Round | Assignment | Job | SiteEvaluation
Changes = MappingProxyType[tuple[str, str], str]


def _job_changes(table: type[Job]) -> dict[tuple[str, str], str]:
    return {
        (J.QUEUED, J.RUNNING): f"{table.kind}.started",
        (J.QUEUED, J.CANCELLED): f"{table.kind}.cancelled",
        (J.RUNNING, J.COMPLETED): f"{table.kind}.completed",
        (J.RUNNING, J.FAILED): f"{table.kind}.failed",
        (J.RUNNING, J.CANCELLED): f"{table.kind}.cancelled",
    }


TRANSITIONS: MappingProxyType[type[Row], Changes] = MappingProxyType(
    {
        Run: MappingProxyType(
            {
                (S.CREATED, S.RUNNING): "run.started",
                (S.RUNNING, S.PAUSED): "run.paused",
                (S.PAUSED, S.RUNNING): "run.resumed",
                (S.CREATED, S.FINISHED): "run.finished",
                (S.RUNNING, S.FINISHED): "run.finished",
                (S.PAUSED, S.FINISHED): "run.finished",
                (
                    S.FINISHED,
                    S.RUNNING,
                ): "run.resumed",  # a failed run, or a completed one for further rounds
            }
        ),
        Round: MappingProxyType(
            {
                (R.OPEN, R.AGGREGATING): "round.aggregating",
                (R.AGGREGATING, R.DISTILLING): "round.distilling",
                (R.OPEN, R.CLOSED): "round.closed",
                (R.AGGREGATING, R.CLOSED): "round.closed",
                (R.DISTILLING, R.CLOSED): "round.closed",
                (R.AGGREGATING, R.OPEN): "round.reopened",
                (R.DISTILLING, R.OPEN): "round.reopened",
                (R.CLOSED, R.OPEN): "round.reopened",  # only the failed round of a run that is resumed
            }
        ),
        Assignment: MappingProxyType(
            {
                (A.OFFERED, A.LEASED): "assignment.leased",
                (A.OFFERED, A.EXPIRED): "assignment.expired",
                (A.OFFERED, A.DECLINED): "assignment.declined",
                (A.LEASED, A.SUBMITTED): "assignment.submitted",
                (A.LEASED, A.EXPIRED): "assignment.expired",
                (A.LEASED, A.DECLINED): "assignment.declined",
                (A.DECLINED, A.SUBMITTED): "assignment.submitted",  # a masked vector that is in the sum nevertheless
                (A.SUBMITTED, A.ACCEPTED): "assignment.accepted",
                (A.SUBMITTED, A.REJECTED): "assignment.rejected",
                (A.SUBMITTED, A.EXPIRED): "assignment.expired",
                (A.ACCEPTED, A.REJECTED): "assignment.rejected",  # left out when its round closes
                (A.ACCEPTED, A.EXPIRED): "assignment.expired",  # only before its round is aggregated
            }
        ),
        DistillationJob: MappingProxyType(_job_changes(DistillationJob)),
        Evaluation: MappingProxyType(
            _job_changes(Evaluation)
            | {(J.FAILED, J.QUEUED): "evaluation.queued", (J.CANCELLED, J.QUEUED): "evaluation.queued"}
        ),
        SiteEvaluation: MappingProxyType(
            {
                (E.OFFERED, E.COMPLETED): "site_evaluation.completed",
                (E.OFFERED, E.REFUSED): "site_evaluation.refused",
                (E.OFFERED, E.EXPIRED): "site_evaluation.expired",
                (E.REFUSED, E.OFFERED): "site_evaluation.offered",  # on request: the owner may have removed the cause
                (E.EXPIRED, E.OFFERED): "site_evaluation.offered",
            }
        ),
    }
)
"""The machines: each legal change, and the type of the event that reports it."""


class IllegalTransition(AssertionError):
    """A bug in the code: the change is not in TRANSITIONS."""


class Passed(NamedTuple):
    """A state that a row passes on its way to another, and the event of it."""

    state: S | R | A | J | E
    message: str
    data: dict[str, Any] | None = None


def transition(
    session: Session,
    row: Row,
    after: S | R | A | J | E,
    message: str,
    *,
    via: Passed | None = None,
    data: dict[str, Any] | None = None,
    **values: Any,
) -> bool:
    """Move a row from the state in which the caller saw it to `after`, set `values` too, and record an event.

    A row may pass another state on its way, in the same statement: `via`.

    Returns False, and changes nothing, if another transaction had moved the row, which is then read again at its next
    use. Otherwise a row of this session has its new values. Raises IllegalTransition.
    """
    table = type(row)
    passed = Passed(after, message, data)
    steps = [passed] if via is None else [via, passed]
    kinds = kinds_of(table, row.state, *[step.state for step in steps])
    statement = (
        update(table)
        .where(table.id == row.id, table.state == row.state)
        .values(state=after, **values)
        .returning(table)
        .execution_options(synchronize_session=False, populate_existing=True)
    )
    won = session.scalars(statement).one_or_none() is not None
    if not won and row in session:
        session.expire(row)
    if won:
        for kind, step in zip(kinds, steps, strict=True):
            record(session, kind, step.message, **about(row, step.data))
    return won


def kinds_of(table: type[Row], before: str, *after: str) -> tuple[str, ...]:
    """Return the types of the events of a row that moves through these states. Raises IllegalTransition.

    For a conditional UPDATE that does more than `transition`, whose caller records the events.
    """
    kinds = []
    for state in after:
        kind = TRANSITIONS[table].get((before, state))
        if kind is None:
            raise IllegalTransition(f"{table.__tablename__}: {before} -> {state}")
        kinds.append(kind)
        before = state
    return tuple(kinds)


def pause(session: Session, run: Run, reason: str) -> None:
    """Pause a running run with a reason, or set the reason of another one. The caller holds the run's lock."""
    if run.state == S.RUNNING:
        transition(session, run, S.PAUSED, reason, reason=reason)
    else:
        run.reason = reason
        session.flush()


def about(row: Row, data: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return the subject of an event about this row, as `record` takes it: its run, its round, and its own id."""
    if isinstance(row, Run):
        return {"run_id": row.id, "data": data}
    if isinstance(row, Round):
        return {"run_id": row.run_id, "round_number": row.number, "data": data}
    subject = {"run_id": row.run_id, "round_number": row.round_number}
    if isinstance(row, Assignment):
        return about_assignment(row.id, row.run_id, row.round_number, row.client_id, data)
    if isinstance(row, SiteEvaluation):
        return {**subject, "client_id": row.client_id, "data": {"site_evaluation": str(row.id), **(data or {})}}
    name = "evaluation" if isinstance(row, Evaluation) else "job"
    return {**subject, "data": {name: str(row.id), **(data or {})}}


def about_assignment(
    assignment_id: UUID, run_id: UUID, round_number: int, client_id: str, data: dict[str, Any] | None
) -> dict[str, Any]:
    """Return the subject of an event about an assignment."""
    subject = {"run_id": run_id, "round_number": round_number, "client_id": client_id}
    return {**subject, "data": {"assignment": str(assignment_id), **(data or {})}}
