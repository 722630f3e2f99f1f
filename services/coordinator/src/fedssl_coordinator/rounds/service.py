"""What a run needs next, decided from Postgres alone. Everything here is quick; what computes is in `compute`."""

from collections.abc import Sequence
from enum import Enum, auto
from uuid import UUID

from sqlalchemy import func
from sqlalchemy.orm import Session

from fedssl.protocol.runs import RunSpec
from fedssl.protocol.states import AssignmentState, Outcome, RoundState, RunState, Verdict
from fedssl.protocol.training import CohortConfig
from fedssl.seeding import sample_cohort
from fedssl_coordinator import nudges
from fedssl_coordinator.clients import repository as clients
from fedssl_coordinator.events.repository import record
from fedssl_coordinator.models import Assignment, Round, Run
from fedssl_coordinator.rounds import repository
from fedssl_coordinator.runs import repository as runs
from fedssl_coordinator.transitions import transition


class Step(Enum):
    """What the caller does next."""

    PREPARE = auto()
    AGGREGATE = auto()
    LOOK_AGAIN = auto()
    WAIT = auto()


def next_step(session: Session, run_id: UUID) -> Step:
    """Move the run as far as the database alone can; say what is to be computed. The caller holds the run's lock."""
    run = runs.get(session, run_id)
    if run is None or run.state != RunState.RUNNING:
        return Step.WAIT
    if run.plan is None:
        return Step.PREPARE
    spec = RunSpec.model_validate(run.spec)
    current = repository.unclosed(session, run_id)
    if current is None:
        if run.rounds_closed >= run.num_rounds:
            finish_run(session, run, Outcome.COMPLETED, f"all {run.num_rounds} rounds are closed")
            return Step.WAIT
        return _open(session, run, spec.cohort)
    if current.state == RoundState.AGGREGATING:
        return Step.AGGREGATE
    return _judge(session, run, current, spec.cohort)


def finish_run(session: Session, run: Run, outcome: Outcome, reason: str) -> bool:
    """End the run; False: somebody else ended it first."""
    won = transition(
        session,
        Run,
        run.id,
        RunState(run.state),
        RunState.FINISHED,
        outcome=outcome,
        reason=reason,
        finished_at=func.now(),
    )
    if won:
        record(session, "run.finished", f"{outcome}: {reason}", run_id=run.id, data={"outcome": outcome})
        nudges.wake_watchers(session)
    return won


def close_round(session: Session, current: Round, verdict: Verdict, reason: str) -> bool:
    """Close the round as judged, ending what is still live in it. False: it was closed already."""
    for assignment in repository.assignments(session, [current.id]):
        if assignment.state in repository.LIVE:
            repository.end_assignment(session, assignment, AssignmentState.EXPIRED, f"round closed: {reason}")
    won = transition(
        session,
        Round,
        current.id,
        RoundState(current.state),
        RoundState.CLOSED,
        verdict=verdict,
        reason=reason,
        closed_at=func.now(),
    )
    if won:
        record(
            session,
            "round.closed",
            f"{verdict}: {reason}",
            run_id=current.run_id,
            round_number=current.number,
            data={"verdict": verdict, "clients": _reasons(repository.assignments(session, [current.id]))},
        )
        nudges.wake_watchers(session)
    return won


def _open(session: Session, run: Run, cohort: CohortConfig) -> Step:
    eligible = clients.eligible(session, cohort.clients)
    if len(eligible) < cohort.min_clients:
        message = f"waiting for clients: {len(eligible)} of {cohort.min_clients} have registered"
        if run.reason != message:
            runs.set_reason(session, run.id, message)
            record(session, "run.waiting", message, run_id=run.id)
        return Step.WAIT
    runs.set_reason(session, run.id, None)
    number = run.rounds_closed + 1
    chosen = sample_cohort(eligible, cohort, RunSpec.model_validate(run.spec).seed, number)
    assert run.broadcast is not None, "a prepared run has a broadcast"
    repository.open_round(session, run, run.broadcast, chosen, cohort.deadline_seconds)
    record(
        session,
        "round.opened",
        f"round {number} of {run.num_rounds} offered to {len(chosen)} clients",
        run_id=run.id,
        round_number=number,
        data={"cohort": chosen, "broadcast": run.broadcast},
    )
    nudges.wake_workers(session)
    nudges.wake_watchers(session)
    return Step.WAIT


def _judge(session: Session, run: Run, current: Round, cohort: CohortConfig) -> Step:
    """Whether an open round can go on: re-offer lapsed leases, then count."""
    overdue = repository.is_overdue(session, current.id)
    _expire_leases(session, current, offer_again=not overdue)
    rows = repository.assignments(session, [current.id])
    members = {row.client_id for row in rows}
    accepted = {row.client_id for row in rows if row.state == AssignmentState.ACCEPTED}
    live = [row for row in rows if row.state in repository.LIVE]
    needed = min(cohort.min_updates or len(members), len(members))
    if accepted == members or ((overdue or not live) and len(accepted) >= needed):
        return _start_aggregation(session, current, len(accepted), len(members))
    if live and not overdue:
        return Step.WAIT
    return _without_quorum(session, run, current, cohort, live, members - accepted)


def _start_aggregation(session: Session, current: Round, num_accepted: int, num_members: int) -> Step:
    for assignment in repository.assignments(session, [current.id]):
        if assignment.state in repository.LIVE:
            repository.end_assignment(session, assignment, AssignmentState.EXPIRED, "the round's deadline has passed")
    if transition(session, Round, current.id, RoundState.OPEN, RoundState.AGGREGATING):
        message = f"aggregating {num_accepted} of {num_members} updates"
        record(session, "round.aggregating", message, run_id=current.run_id, round_number=current.number)
        nudges.wake_watchers(session)
    return Step.LOOK_AGAIN


def _expire_leases(session: Session, current: Round, *, offer_again: bool) -> None:
    for assignment in repository.lapsed(session, current.run_id):
        reason = "no heartbeat within the lease"
        if not repository.end_assignment(session, assignment, AssignmentState.EXPIRED, reason):
            continue
        record(
            session,
            "assignment.expired",
            f"{assignment.client_id}: {reason}" + ("; offered again" if offer_again else ""),
            run_id=current.run_id,
            round_number=current.number,
            client_id=assignment.client_id,
        )
        if offer_again:
            repository.offer(session, current, assignment.client_id, assignment.attempt + 1)
            nudges.wake_workers(session)


def _without_quorum(
    session: Session, run: Run, current: Round, cohort: CohortConfig, live: Sequence[Assignment], missing: set[str]
) -> Step:
    """The attempt is over without enough updates: offer again what is missing, or end as the spec says."""
    for assignment in live:
        repository.end_assignment(session, assignment, AssignmentState.EXPIRED, "the round's deadline has passed")
    rows = repository.assignments(session, [current.id])
    reasons = _reasons([row for row in rows if row.client_id in missing])
    why = "; ".join(f"{client}: {reason}" for client, reason in reasons.items())
    if current.attempt < cohort.max_attempts:
        attempts = {row.client_id: row.attempt for row in rows}
        repository.extend(session, current.id, cohort.deadline_seconds, next_attempt=True)
        for client_id in sorted(missing):
            repository.offer(session, current, client_id, attempts[client_id] + 1)
        record(
            session,
            "round.reoffered",
            f"attempt {current.attempt} of {cohort.max_attempts}, offered again: {why}",
            run_id=current.run_id,
            round_number=current.number,
            data={"clients": reasons},
        )
        nudges.wake_workers(session)
        return Step.WAIT
    reason = f"too few updates after {current.attempt} attempts: {why}"
    if cohort.without_quorum == "skip":
        close_round(session, current, Verdict.SKIPPED, reason)
        runs.count_round(session, run.id)
        return Step.LOOK_AGAIN
    close_round(session, current, Verdict.FAILED, reason)
    finish_run(session, run, Outcome.FAILED, f"round {current.number}: {reason}")
    return Step.WAIT


def _reasons(rows: Sequence[Assignment]) -> dict[str, str]:
    """The newest word on every client: how its assignment ended, and why."""
    return {row.client_id: row.reason or str(row.state) for row in rows}
