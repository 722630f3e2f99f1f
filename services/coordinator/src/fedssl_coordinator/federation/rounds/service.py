"""Decides a run's next step from Postgres only. Everything here is quick: the aggregator computes.

A transaction that changes a run or one of its rounds holds the run's row lock from its first line on, so that an
operator's stop and an aggregator's close cannot cross.
"""

from collections.abc import Mapping, Sequence
from enum import Enum, auto
from typing import Any
from uuid import UUID

from sqlalchemy import func
from sqlalchemy.orm import Session

from fedssl.errors import SpecError
from fedssl.protocol.runs import RunSpec
from fedssl.protocol.states import AssignmentState, Outcome, RoundState, RunState, Verdict
from fedssl.protocol.training import CohortConfig
from fedssl.seeding import asked_cohort
from fedssl_coordinator.core import enqueue
from fedssl_coordinator.core.audit import record
from fedssl_coordinator.core.models import Assignment, Round, Run
from fedssl_coordinator.core.problems import printable
from fedssl_coordinator.federation import retries, run_rows
from fedssl_coordinator.federation.dimensions import service as dimensions
from fedssl_coordinator.federation.distillation import repository as distillation_jobs
from fedssl_coordinator.federation.distillation import service as distillation
from fedssl_coordinator.federation.evaluations import service as evaluations
from fedssl_coordinator.federation.retries import LONGEST_PAUSE_SECONDS
from fedssl_coordinator.federation.rounds import fitness, policies, repository
from fedssl_coordinator.federation.transitions import transition
from fedssl_coordinator.identity import clients

_CLIENTS_SHOWN = 5


class Step(Enum):
    """The caller's next step."""

    PREPARE = auto()
    AGGREGATE = auto()
    CHECK_AGAIN = auto()
    WAIT = auto()


def next_step(session: Session, run_id: UUID) -> Step:
    """Move the run as far as it goes without a computation, and return the caller's next step."""
    run = run_rows.locked(session, run_id)
    if run is None or run.state != RunState.RUNNING:
        return Step.WAIT
    spec = RunSpec.model_validate(run.spec)
    if run.plan is None:
        if num_epochs := spec.method.distillation_epochs(0):
            return _distil(session, run, 0, num_epochs)
        return _begin(session, run, Step.PREPARE)
    current = repository.unclosed(session, run_id)
    if current is None:
        if run.rounds_closed >= run.num_rounds:
            end_run(session, run, Outcome.COMPLETED, f"all {run.num_rounds} rounds are closed")
            return Step.WAIT
        return _open(session, run, spec)
    if current.state == RoundState.AGGREGATING:
        return _begin(session, run, Step.AGGREGATE)
    if current.state == RoundState.DISTILLING:
        return _distil(session, run, current.number, spec.method.distillation_epochs(current.number))
    return _check_open_round(session, run, current, spec)


def end_run(session: Session, run: Run, outcome: Outcome, reason: str) -> None:
    """End the run and its round in progress. The caller holds the run's lock."""
    reason = printable(reason)
    distillation.end_unfinished(session, run, f"run {outcome}: {reason}")
    current = repository.unclosed(session, run.id)
    if current is not None:
        close_round(session, current, Verdict.FAILED, reason)
    about = {"outcome": outcome, "reason": reason, "finished_at": func.now()}
    won = transition(session, run, RunState.FINISHED, f"{outcome}: {reason}", data={"outcome": outcome}, **about)
    assert won, "the run is locked"
    enqueue.wake_watchers(session)


def close_round(session: Session, current: Round, verdict: Verdict, reason: str) -> None:
    """Close the round with a verdict, and end its live assignments. The caller holds the run's lock."""
    _end_live(session, current, f"round closed: {reason}")
    won = transition(
        session,
        current,
        RoundState.CLOSED,
        f"{verdict}: {reason}",
        data={"verdict": verdict, "clients": _reasons(repository.assignments(session, [current.id]))},
        verdict=verdict,
        reason=reason,
        closed_at=func.now(),
    )
    assert won, "the run is locked, and its rounds with it"
    enqueue.wake_watchers(session)


def end_without_result(session: Session, run: Run, current: Round, cohort: CohortConfig, reason: str) -> None:
    """Close a round that gives no new weights as skipped, or end the whole run: the spec chooses. The caller holds the
    run's lock."""
    if cohort.without_quorum != "skip":
        end_run(session, run, Outcome.FAILED, f"round {current.number}: {reason}")
        return
    close_round(session, current, Verdict.SKIPPED, reason)
    run_rows.count_round(session, run)
    if run.rounds_closed == run.num_rounds:  # the last round is evaluated even if it did not change the weights
        evaluations.queue_due(session, run, run.num_rounds)


def ask_again(session: Session, run: Run, current: Round, lost: Mapping[UUID, str]) -> None:
    """Reopen a round whose accepted updates the store has partly lost, and ask only their clients again.

    `lost` has the reason per assignment. The round gets its whole time again, and no attempt is counted. The caller
    holds the run's lock.
    """
    rows = repository.assignments(session, [current.id])
    reasons = {row.client_id: lost[row.id] for row in rows if row.id in lost}
    message = f"asked again: {_shortened(reasons)}"
    won = transition(session, current, RoundState.OPEN, message, data={"clients": reasons})
    assert won, "the run is locked, and its rounds with it"
    repository.extend(session, current, RunSpec.model_validate(run.spec).cohort.deadline_seconds, next_attempt=False)
    for row in rows:
        if row.id in lost:
            _expire(session, row, lost[row.id], "; asked again", update_digest=None)
    repository.offer(session, current, {row.client_id: row.attempt + 1 for row in rows if row.client_id in reasons})
    retries.reset(session, run)
    run_rows.set_reason(session, run, f"round {current.number}: {message}")
    enqueue.wake_workers(session)
    enqueue.wake_watchers(session)


def record_failure(session: Session, run_id: UUID, why: str, *, begun: bool) -> None:
    """Pause a run if a computation that `next_step` began, or that step itself, failed for a reason that may pass."""
    run = run_rows.locked(session, run_id)
    if run is not None and run.state != RunState.FINISHED:
        retries.record_failure(session, run, why, begun=begun)


def _begin(session: Session, run: Run, step: Step) -> Step:
    if not retries.may_begin(session, run):
        return Step.WAIT
    retries.begin(session, run)
    return step


def _distil(session: Session, run: Run, round_number: int, num_epochs: int) -> Step:
    """Queue the training on the coordinator in this round. It has its own queue, so nothing waits here."""
    if distillation_jobs.unfinished(session, run.id) is None:
        distillation.queue(session, run, round_number, num_epochs)
    return Step.WAIT


def _open(session: Session, run: Run, spec: RunSpec) -> Step:
    cohort = spec.cohort
    eligible = clients.eligible(session, cohort.clients)
    refused = policies.refusals(session, run, spec, eligible)
    unfit = fitness.unfit(session, spec, run.method_version, eligible)
    left_out = unfit | refused
    eligible = [name for name in eligible if name not in left_out]
    if (message := _waits_for_clients(cohort, len(eligible))) is not None:
        return _wait(session, run, message + (f" and may take part; {_shortened(left_out)}" if left_out else ""))
    try:
        members = dimensions.owners(session, run.id, spec, eligible)
    except SpecError as error:
        end_run(session, run, Outcome.FAILED, str(error))
        return Step.WAIT
    if (message := _waits_for_clients(cohort, len(members))) is not None:
        return _wait(session, run, f"{message} and own dimensions of the embedding")
    run_rows.set_reason(session, run, None)
    retries.reset(session, run)  # a failure here does not affect the next computation
    number = run.rounds_closed + 1
    chosen = asked_cohort(members, cohort, spec.seed, number)
    num_wanted = cohort.num_wanted(len(members))
    more = len(chosen) > num_wanted
    assert run.broadcast is not None, "a prepared run has a broadcast"
    seconds = cohort.deadline_seconds
    repository.open_round(session, run, run.broadcast, chosen, seconds, num_wanted if more else None)
    offered = f"round {number} of {run.num_rounds} offered to {len(chosen)} clients"
    record(
        session,
        "round.opened",
        offered + (f"; the first {num_wanted} updates count" if more else ""),
        run_id=run.id,
        round_number=number,
        data={"cohort": chosen, "broadcast": run.broadcast},
    )
    if refused:
        message = f"not offered to {_shortened(refused)}"
        record(session, "policy.refuses", message, run_id=run.id, round_number=number, data={"clients": refused})
    fitness.record_left_out(session, run, number, unfit)
    enqueue.wake_workers(session)
    enqueue.wake_watchers(session)
    return Step.WAIT


def _wait(session: Session, run: Run, message: str) -> Step:
    if run.reason != message:
        run_rows.set_reason(session, run, message)
        record(session, "run.waiting", message, run_id=run.id)
        enqueue.wake_watchers(session)
    return Step.WAIT


def _waits_for_clients(cohort: CohortConfig, num_eligible: int) -> str | None:
    """Return why no round can be opened yet, or None if one can."""
    if num_eligible < cohort.min_clients:
        return f"waiting for clients: {num_eligible} of {cohort.min_clients} have registered"
    num_wanted = cohort.num_wanted(num_eligible)
    if cohort.min_updates is not None and num_wanted < cohort.min_updates:
        return (
            f"waiting for clients: cohort.min_updates asks for {cohort.min_updates} updates, but a cohort is only "
            f"{num_wanted} of {num_eligible} registered clients"
        )
    return None


def _check_open_round(session: Session, run: Run, current: Round, spec: RunSpec) -> Step:
    """Close an open round or offer it again when it is time, and return the caller's next step."""
    cohort = spec.cohort
    overdue = repository.is_overdue(session, current.id)
    enough = repository.has_enough(session, current)
    _end_lost(session, current, offer_again=not (overdue or enough))
    if repository.has_live(session, current.id) and not (overdue or enough):
        if run.num_tries:  # an earlier check failed, and this one has not
            retries.reset(session, run)
            run_rows.set_reason(session, run, None)
            enqueue.wake_watchers(session)
        return Step.WAIT
    # Once nothing is live nothing more can be accepted, so the count below is final.
    late = f"the round closed with the first {current.num_wanted} updates: this client's came too late and is not used"
    _end_live(session, current, late if enough else "the round's deadline has passed")
    rows = repository.assignments(session, [current.id])
    members = {row.client_id for row in rows}
    accepted = {row.client_id for row in rows if row.state == AssignmentState.ACCEPTED}
    missing = members.intersection(clients.eligible(session, sorted(members - accepted)))
    awaited = missing - policies.refusals(session, run, spec, sorted(missing)).keys()
    awaited -= fitness.unfit(session, spec, run.method_version, sorted(missing)).keys()
    if len(accepted) >= _quorum(cohort, current, len(accepted) + len(awaited)):
        message = f"aggregating {len(accepted)} of {len(members)} updates"
        transition(session, current, RoundState.AGGREGATING, message)
        enqueue.wake_watchers(session)
        if num_epochs := spec.method.distillation_epochs(current.number):
            transition(session, current, RoundState.DISTILLING, f"training for {num_epochs} epochs on the updates")
            return _distil(session, run, current.number, num_epochs)
        return Step.CHECK_AGAIN
    attempts = {row.client_id: row.attempt for row in rows if row.client_id not in accepted}
    reasons = {client: reason for client, reason in _reasons(rows).items() if client not in accepted}
    if missing and current.attempt < cohort.max_attempts:  # a policy that was closed may be opened again
        again = {client: attempts[client] + 1 for client in sorted(missing)}
        newest = {row.client_id: row.state for row in rows}
        # Asked again at once, it would decline again: its attempts leave time for what it lacks to come back.
        pause = min(cohort.deadline_seconds / 10, LONGEST_PAUSE_SECONDS)
        pauses = {client: pause for client in again if newest[client] == AssignmentState.DECLINED}
        return _offer_again(session, current, cohort, again, reasons, pauses)
    return _without_quorum(session, run, current, cohort, reasons)


def _quorum(cohort: CohortConfig, current: Round, num_possible: int) -> int:
    """Return the fewest updates that a round can close with: the number in the spec, even if there are fewer clients.

    Without such a number, every client that was not revoked in the meantime counts, or as many as the round wants.
    """
    if cohort.min_updates is not None:
        return cohort.min_updates
    return max(1, min(num_possible, current.num_wanted or num_possible))


def _end_lost(session: Session, current: Round, *, offer_again: bool) -> None:
    """End the lost assignments of a round. A client whose lease ran out may come back until the deadline."""
    again = {}
    for assignment, is_revoked in repository.lost(session, current.id):
        reason = "the client was revoked" if is_revoked else "no heartbeat within the lease"
        offered = offer_again and not is_revoked
        if offered:
            again[assignment.client_id] = assignment.attempt + 1
        _expire(session, assignment, reason, "; offered again" if offered else "")
    if again:
        repository.offer(session, current, again)
        enqueue.wake_workers(session)


def _end_live(session: Session, current: Round, reason: str) -> None:
    for assignment in repository.locked_live(session, round_id=current.id):
        _expire(session, assignment, reason)


def _expire(session: Session, assignment: Assignment, reason: str, consequence: str = "", **values: str | None) -> None:
    message = f"{assignment.client_id}: {reason}{consequence}"
    closed: dict[str, Any] = {"reason": reason, "closed_at": func.now(), **values}
    won = transition(session, assignment, AssignmentState.EXPIRED, message, **closed)
    assert won, "the row is locked"


def _offer_again(
    session: Session,
    current: Round,
    cohort: CohortConfig,
    attempts: dict[str, int],
    reasons: Mapping[str, str],
    pauses: Mapping[str, float],
) -> Step:
    """Keep the updates of an attempt that ended without enough of them, and offer the other assignments again."""
    repository.extend(session, current, cohort.deadline_seconds, next_attempt=True)
    repository.offer(session, current, attempts, pauses)
    record(
        session,
        "round.reoffered",
        f"attempt {current.attempt} of {cohort.max_attempts}, offered again: {_shortened(reasons)}",
        run_id=current.run_id,
        round_number=current.number,
        data={"clients": dict(reasons)},
    )
    enqueue.wake_workers(session)
    enqueue.wake_watchers(session)
    return Step.WAIT


def _without_quorum(
    session: Session, run: Run, current: Round, cohort: CohortConfig, reasons: Mapping[str, str]
) -> Step:
    """End a round that has no attempt left, or the whole run: the spec chooses."""
    reason = f"too few updates after {current.attempt} attempts: {_shortened(reasons)}"
    if unusual := repository.unusual_before(session, current):
        reason += f". Before it, the update of {', '.join(unusual)} was unusual: see the events update.unusual"
    end_without_result(session, run, current, cohort, reason)
    return Step.WAIT if run.state == RunState.FINISHED else Step.CHECK_AGAIN


def _reasons(rows: Sequence[Assignment]) -> dict[str, str]:
    """Return how and why each client's newest assignment ended."""
    return {row.client_id: row.reason or str(row.state) for row in rows}


def _shortened(reasons: Mapping[str, str]) -> str:
    """Return the first few reasons as one line. The event's data has all of them."""
    shown = "; ".join(f"{client}: {reason}" for client, reason in list(reasons.items())[:_CLIENTS_SHOWN])
    more = len(reasons) - _CLIENTS_SHOWN
    return shown + (f"; and {more} more clients" if more > 0 else "")
