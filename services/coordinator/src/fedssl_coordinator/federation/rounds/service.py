"""What a run needs next, decided from Postgres alone. Everything here is quick; what computes is in `compute`.

Whoever changes a run or one of its rounds holds the run's row lock from the first line on: an operator's stop and an
aggregator's close cannot cross.
"""

from collections.abc import Mapping, Sequence
from enum import Enum, auto
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
from fedssl_coordinator.federation import retries
from fedssl_coordinator.federation.dimensions import service as dimensions
from fedssl_coordinator.federation.distillation import service as distillation
from fedssl_coordinator.federation.evaluations import service as evaluations
from fedssl_coordinator.federation.retries import LONGEST_PAUSE_SECONDS
from fedssl_coordinator.federation.rounds import policies, repository
from fedssl_coordinator.federation.runs import repository as runs
from fedssl_coordinator.federation.transitions import transition
from fedssl_coordinator.identity import clients

_CLIENTS_SHOWN = 5


class Step(Enum):
    """What the caller does next."""

    PREPARE = auto()
    AGGREGATE = auto()
    LOOK_AGAIN = auto()
    WAIT = auto()


def next_step(session: Session, run_id: UUID) -> Step:
    """Move the run as far as the database alone can; say what is to be computed."""
    run = runs.locked(session, run_id)
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
    return _judge(session, run, current, spec)


def end_run(session: Session, run: Run, outcome: Outcome, reason: str) -> None:
    """End the run, and the round that is in progress. The caller holds the run's lock."""
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
    """Close the round as judged, ending what is still live in it. The caller holds the run's lock."""
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


def note_failure(session: Session, run_id: UUID, why: str, *, begun: bool) -> None:
    """A computation that `next_step` had begun, or that step itself, has failed for a reason that may pass."""
    run = runs.locked(session, run_id)
    if run is not None and run.state != RunState.FINISHED:
        retries.note_failure(session, run, why, begun=begun)


def _begin(session: Session, run: Run, step: Step) -> Step:
    if not retries.may_begin(session, run):
        return Step.WAIT
    retries.begin(session, run)
    return step


def _distil(session: Session, run: Run, round_number: int, num_epochs: int) -> Step:
    """Have the coordinator train what it trains in this round; a queue of its own does that, so nothing waits here."""
    if distillation.unfinished(session, run.id) is None:
        distillation.queue(session, run, round_number, num_epochs)
    return Step.WAIT


def _open(session: Session, run: Run, spec: RunSpec) -> Step:
    cohort = spec.cohort
    eligible = clients.eligible(session, cohort.clients)
    refused = policies.refusals(session, run, spec, eligible)
    eligible = [name for name in eligible if name not in refused]
    if (message := _waits_for_clients(cohort, len(eligible))) is not None:
        return _wait(session, run, message + (f" and may take part; {_some(refused)}" if refused else ""))
    try:
        members = dimensions.owners(session, run.id, spec, eligible)
    except SpecError as error:
        end_run(session, run, Outcome.FAILED, str(error))
        return Step.WAIT
    if (message := _waits_for_clients(cohort, len(members))) is not None:
        return _wait(session, run, f"{message} and own dimensions of the embedding")
    runs.set_reason(session, run, None)
    retries.start_anew(session, run)  # what failed here says nothing of the next computation
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
        offered + (f", of whom the first {num_wanted} count" if more else ""),
        run_id=run.id,
        round_number=number,
        data={"cohort": chosen, "broadcast": run.broadcast},
    )
    if refused:
        message = f"not offered to {_some(refused)}"
        record(session, "policy.refuses", message, run_id=run.id, round_number=number, data={"clients": refused})
    enqueue.wake_workers(session)
    enqueue.wake_watchers(session)
    return Step.WAIT


def _wait(session: Session, run: Run, message: str) -> Step:
    if run.reason != message:
        runs.set_reason(session, run, message)
        record(session, "run.waiting", message, run_id=run.id)
        enqueue.wake_watchers(session)
    return Step.WAIT


def _waits_for_clients(cohort: CohortConfig, num_eligible: int) -> str | None:
    """Why no round can be opened yet; None: one can."""
    if num_eligible < cohort.min_clients:
        return f"waiting for clients: {num_eligible} of {cohort.min_clients} have registered"
    num_wanted = cohort.num_wanted(num_eligible)
    if cohort.min_updates is not None and num_wanted < cohort.min_updates:
        return (
            f"waiting for clients: cohort.min_updates asks for {cohort.min_updates} updates, and a cohort is "
            f"{num_wanted}, for {num_eligible} have registered"
        )
    return None


def _judge(session: Session, run: Run, current: Round, spec: RunSpec) -> Step:
    """Whether an open round can go on."""
    cohort = spec.cohort
    overdue = repository.is_overdue(session, current.id)
    enough = repository.has_enough(session, current)
    _end_lost(session, current, offer_again=not (overdue or enough))
    if repository.has_live(session, current.id) and not (overdue or enough):
        if run.num_tries:  # an earlier look failed, and this one has not
            retries.start_anew(session, run)
            runs.set_reason(session, run, None)
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
    if len(accepted) >= _quorum(cohort, current, len(accepted) + len(awaited)):
        message = f"aggregating {len(accepted)} of {len(members)} updates"
        transition(session, current, RoundState.AGGREGATING, message)
        enqueue.wake_watchers(session)
        if num_epochs := spec.method.distillation_epochs(current.number):
            transition(session, current, RoundState.DISTILLING, f"training for {num_epochs} epochs on the updates")
            return _distil(session, run, current.number, num_epochs)
        return Step.LOOK_AGAIN
    attempts = {row.client_id: row.attempt for row in rows if row.client_id not in accepted}
    reasons = {client: reason for client, reason in _reasons(rows).items() if client not in accepted}
    if missing and current.attempt < cohort.max_attempts:  # a policy that was closed may be opened again
        again = {client: attempts[client] + 1 for client in sorted(missing)}
        newest = {row.client_id: row.state for row in rows}
        # Asked again at once, it would decline again: its attempts are for whatever it lacks to come back.
        pause = min(cohort.deadline_seconds / 10, LONGEST_PAUSE_SECONDS)
        pauses = {client: pause for client in again if newest[client] == AssignmentState.DECLINED}
        return _offer_again(session, current, cohort, again, reasons, pauses)
    return _without_quorum(session, run, current, cohort, reasons)


def _quorum(cohort: CohortConfig, current: Round, num_possible: int) -> int:
    """Fewest updates to close with: as the spec says, however few clients there are; else those of everybody who was
    not revoked meanwhile, or of as many as the round wants.
    """
    if cohort.min_updates is not None:
        return cohort.min_updates
    return max(1, min(num_possible, current.num_wanted or num_possible))


def _end_lost(session: Session, current: Round, *, offer_again: bool) -> None:
    """End assignments that nobody will deliver; a client whose lease ran out may come back until the deadline."""
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


def _expire(session: Session, assignment: Assignment, reason: str, consequence: str = "") -> None:
    message = f"{assignment.client_id}: {reason}{consequence}"
    won = transition(session, assignment, AssignmentState.EXPIRED, message, reason=reason, closed_at=func.now())
    assert won, "the row is locked"


def _offer_again(
    session: Session,
    current: Round,
    cohort: CohortConfig,
    attempts: dict[str, int],
    reasons: Mapping[str, str],
    pauses: Mapping[str, float],
) -> Step:
    """The attempt is over without enough updates: keep those that came, offer the rest again."""
    repository.extend(session, current, cohort.deadline_seconds, next_attempt=True)
    repository.offer(session, current, attempts, pauses)
    record(
        session,
        "round.reoffered",
        f"attempt {current.attempt} of {cohort.max_attempts}, offered again: {_some(reasons)}",
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
    """No attempt is left: end the round, or the whole run, as the spec says."""
    reason = f"too few updates after {current.attempt} attempts: {_some(reasons)}"
    if cohort.without_quorum == "skip":
        close_round(session, current, Verdict.SKIPPED, reason)
        runs.count_round(session, run)
        if run.rounds_closed == run.num_rounds:  # the last is judged even if it left the weights as they were
            evaluations.queue_due(session, run, run.num_rounds)
        return Step.LOOK_AGAIN
    end_run(session, run, Outcome.FAILED, f"round {current.number}: {reason}")
    return Step.WAIT


def _reasons(rows: Sequence[Assignment]) -> dict[str, str]:
    """The newest word on every client: how its assignment ended, and why."""
    return {row.client_id: row.reason or str(row.state) for row in rows}


def _some(reasons: Mapping[str, str]) -> str:
    """For one line of text; the event's data has them all."""
    shown = "; ".join(f"{client}: {reason}" for client, reason in list(reasons.items())[:_CLIENTS_SHOWN])
    more = len(reasons) - _CLIENTS_SHOWN
    return shown + (f"; and {more} more clients" if more > 0 else "")
