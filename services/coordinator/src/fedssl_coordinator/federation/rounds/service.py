"""Decides a run's next step from Postgres only. Everything here is quick: the aggregator computes.

A transaction that changes a run or one of its rounds holds the run's row lock from its first line on, so that an
operator's stop and an aggregator's close cannot cross.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any
from uuid import UUID

from sqlalchemy import func
from sqlalchemy.orm import Session

from fedssl.errors import SpecError
from fedssl.protocol.plan import ArtifactPlan
from fedssl.protocol.runs import RunSpec
from fedssl.protocol.secure_aggregation import SecureAggregationConfig
from fedssl.protocol.secure_work import OUT_OF_RANGE, SecureMember
from fedssl.protocol.states import AssignmentState, Cause, Outcome, RoundState, RunState, Verdict
from fedssl.protocol.training import CohortConfig
from fedssl.secure_aggregation import RoundContext
from fedssl.secure_aggregation.round_context import round_context
from fedssl.seeding import asked_cohort
from fedssl_coordinator.core import enqueue
from fedssl_coordinator.core.audit import record
from fedssl_coordinator.core.models import Assignment, Round, Run
from fedssl_coordinator.core.problems import ProblemError, printable
from fedssl_coordinator.federation import retries, run_rows
from fedssl_coordinator.federation.dimensions import service as dimensions
from fedssl_coordinator.federation.distillation import repository as distillation_jobs
from fedssl_coordinator.federation.distillation import service as distillation
from fedssl_coordinator.federation.evaluations import service as evaluations
from fedssl_coordinator.federation.retries import LONGEST_PAUSE_SECONDS
from fedssl_coordinator.federation.rounds import fitness, policies, repository
from fedssl_coordinator.federation.rounds.fitness import shortened
from fedssl_coordinator.federation.secure_rounds import service as secure_rounds
from fedssl_coordinator.federation.transitions import Passed, about, pause, transition
from fedssl_coordinator.identity import clients
from fedssl_coordinator.storage.artifacts import repository as artifacts


class Step(Enum):
    """The caller's next step."""

    PREPARE = auto()
    AGGREGATE = auto()
    CHECK_INPUTS = auto()
    COUNT_WORDS = auto()
    CHECK_AGAIN = auto()
    WAIT = auto()


@dataclass(frozen=True, slots=True)
class CheckedInputs:
    """The result of a check of what a round's clients get from the coordinator: its `faults`, or none."""

    round_id: UUID
    faults: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class NextVector:
    """The masked vector of each client in the next round: its number of words, and `RoundContext.total_bits`."""

    num_words: int
    total_bits: tuple[int, int] | None


def next_step(
    session: Session, run_id: UUID, checked: CheckedInputs | None = None, *, vector: NextVector | None = None
) -> Step:
    """Move the run as far as it goes without a computation, and return the caller's next step.

    After CHECK_INPUTS the caller checks the round's inputs in the store, outside of any transaction, and calls again
    with the result. After COUNT_WORDS it calls again with the masked vector of each client in the next round.
    """
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
        if spec.secure_aggregation is not None and vector is None:
            return Step.COUNT_WORDS
        return _open(session, run, spec, vector)
    if current.state == RoundState.AGGREGATING:
        return _begin(session, run, Step.AGGREGATE)
    if current.state == RoundState.DISTILLING:
        return _distil(session, run, current.number, spec.method.distillation_epochs(current.number))
    if spec.secure_aggregation is not None:
        return _check_secure_round(session, run, current, spec.secure_aggregation)
    return _check_open_round(session, run, current, spec, checked)


def take_up(session: Session, run: Run) -> None:
    """Let a failed run continue from its last closed round. The caller holds the run's lock.

    The round in which it failed is open again: its accepted updates count, and the other clients are asked again.
    Raises ProblemError if the run's weights were removed.
    """
    for digest in (run.broadcast, run.server_state, run.frozen):
        if digest is not None and not artifacts.hold(session, digest):
            detail = f"run {run.id} cannot be resumed: its weights, artifact {digest}, were removed from the store"
            raise ProblemError("conflict", detail)
    data = {"outcome": run.outcome, "reason": run.reason, "rounds_closed": run.rounds_closed}
    message = f"taken up after round {run.rounds_closed}, although it had failed: {run.reason}"
    won = transition(
        session,
        run,
        RunState.RUNNING,
        message,
        data=data,
        outcome=None,
        reason=None,
        finished_at=None,
        **retries.NO_TRIES,
    )
    assert won, "the run is locked"
    failed = repository.latest(session, run.id)
    if failed is not None and failed.verdict == Verdict.FAILED:
        if run.spec.get("secure_aggregation"):
            _count_without_weights(session, run)  # a secure round has one attempt
        else:
            _reopen(session, run, failed)
    enqueue.advance(session, run.id)
    enqueue.wake_workers(session)


def end_run(session: Session, run: Run, outcome: Outcome, reason: str) -> None:
    """End the run and its round in progress. The caller holds the run's lock."""
    reason = printable(reason)
    distillation.end_unfinished(session, run, f"run {outcome}: {reason}")
    current = repository.unclosed(session, run.id)
    if current is not None:
        close_round(session, current, Verdict.FAILED, reason)
    values: dict[str, Any] = {"outcome": outcome, "reason": reason, "finished_at": func.now()}
    won = transition(session, run, RunState.FINISHED, f"{outcome}: {reason}", data={"outcome": outcome}, **values)
    assert won, "the run is locked"
    enqueue.wake_watchers(session)


def close_round(session: Session, current: Round, verdict: Verdict, reason: str) -> None:
    """Close the round with a verdict, and end its live assignments. The caller holds the run's lock."""
    if run_rows.get_one(session, current.run_id).spec.get("secure_aggregation"):
        secure_rounds.close(session, current, has_sum=verdict in (Verdict.AGGREGATED, Verdict.PARTIAL))
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
    skip_round(session, run, current, reason)


def skip_round(session: Session, run: Run, current: Round, reason: str) -> None:
    """Close a round without new weights, and continue with the next one. The caller holds the run's lock."""
    close_round(session, current, Verdict.SKIPPED, reason)
    _count_without_weights(session, run)


def _count_without_weights(session: Session, run: Run) -> None:
    """Count a closed round that gave no new weights."""
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
    message = f"asked again: {shortened(reasons)}"
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


def _reopen(session: Session, run: Run, failed: Round) -> None:
    """Open the round in which a run had failed again. Its assignments stay as they ended."""
    spec = RunSpec.model_validate(run.spec)
    values = repository.values_of_reopened(spec.cohort.deadline_seconds)
    won = transition(session, failed, RoundState.OPEN, f"round {failed.number} is open again", **values)
    assert won, "the run is locked"
    rows = repository.assignments(session, [failed.id])
    members = sorted({row.client_id for row in rows})
    eligible = set(clients.eligible(session, run.project, members))
    kept = set()
    for row in rows:
        if row.state == AssignmentState.ACCEPTED:
            assert row.update_digest is not None, "a constraint: an accepted assignment has an update"
            if row.client_id not in eligible:
                _expire(session, row, "the client was revoked")
            elif not artifacts.hold(session, row.update_digest):
                _expire(session, row, "its update was removed from the store while the run had ended")
            else:
                kept.add(row.client_id)
    others = sorted(eligible - kept)
    left_out = fitness.unfit(session, spec, run.method_version, others) | policies.refusals(session, run, spec, others)
    attempts = {row.client_id: row.attempt for row in rows}
    asked = sorted(eligible - kept - left_out.keys())
    repository.offer(session, failed, {client: attempts[client] + 1 for client in asked})
    if asked:
        ends = _reasons(rows)
        _record_offers(session, failed, "the run was resumed", {client: ends[client] for client in asked})


def _begin(session: Session, run: Run, step: Step) -> Step:
    if retries.is_quarantined(run):
        current = repository.unclosed(session, run.id)
        what = "the preparation of the run" if current is None else f"the aggregation of round {current.number}"
        pause(session, run, f"{retries.quarantine_reason(run, what)}, and resume the run to try it again")
        enqueue.wake_watchers(session)
        return Step.WAIT
    if not retries.may_begin(session, run):
        return Step.WAIT
    retries.begin(session, run)
    return step


def _distil(session: Session, run: Run, round_number: int, num_epochs: int) -> Step:
    """Queue the training on the coordinator in this round. It has its own queue, so nothing waits here."""
    if distillation_jobs.unfinished(session, run.id) is None:
        distillation.queue(session, run, round_number, num_epochs)
    return Step.WAIT


def _open(session: Session, run: Run, spec: RunSpec, vector: NextVector | None) -> Step:
    cohort = spec.cohort
    eligible = clients.eligible(session, run.project, cohort.clients)
    refused = policies.refusals(session, run, spec, eligible)
    unfit = fitness.unfit(session, spec, run.method_version, eligible)
    left_out = unfit | refused
    eligible = [name for name in eligible if name not in left_out]
    if (message := _waits_for_clients(cohort, len(eligible))) is not None:
        return _wait(session, run, message + (f" and may take part; {shortened(left_out)}" if left_out else ""))
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
    context = None
    if spec.secure_aggregation is not None:
        try:
            context = _secure_context(session, run, spec, number, vector, chosen)
        except ValueError as error:
            return _wait(session, run, f"waiting for clients: the cohort has no secure sum: {error}")
    seconds = cohort.deadline_seconds
    opened = repository.open_round(session, run, run.broadcast, chosen, seconds, num_wanted if more else None)
    if spec.secure_aggregation is not None and context is not None:
        secure_rounds.begin(session, opened, context, spec.secure_aggregation.phase_seconds)
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
        message = f"not offered to {shortened(refused)}"
        record(session, "policy.refuses", message, run_id=run.id, round_number=number, data={"clients": refused})
    fitness.record_left_out(session, run, number, unfit)
    if number == 1:
        evaluations.ask_sites_before_training(session, run, spec)
    enqueue.wake_workers(session)
    enqueue.wake_watchers(session)
    return Step.WAIT


def _secure_context(
    session: Session, run: Run, spec: RunSpec, number: int, vector: NextVector | None, chosen: Sequence[str]
) -> RoundContext:
    """Return the context of a secure round. Raises ValueError if it cannot be one with these clients."""
    assert vector is not None, "counted before"
    assert run.broadcast is not None, "a prepared run has a broadcast"
    identities = clients.identities(session, chosen)
    return round_context(
        str(run.id),
        number,
        spec=spec,
        plan=ArtifactPlan.model_validate(run.plan),
        broadcast=run.broadcast,
        frozen=run.frozen,
        num_words=vector.num_words,
        total_bits=vector.total_bits,
        cohort=[SecureMember(client=name, identity=identities[name][0] or "") for name in chosen],
    )


def _check_secure_round(session: Session, run: Run, current: Round, config: SecureAggregationConfig) -> Step:
    """Move an open secure round on, which has one attempt: nothing is offered again."""
    answered = secure_rounds.vectors(session, current.id)
    for assignment, is_revoked in repository.lost(session, current.id):
        if assignment.client_id not in answered:  # otherwise its vector is in the sum, whether it comes back or not
            _expire(session, assignment, "the client was revoked" if is_revoked else "no heartbeat within the lease")
    rows = repository.assignments(session, [current.id])
    out_of_range = [row.reason for row in rows if row.reason is not None and row.reason.startswith(OUT_OF_RANGE)]
    if out_of_range:
        skip_round(session, run, current, out_of_range[0])
        return Step.CHECK_AGAIN
    is_overdue = repository.is_overdue(session, current.id)
    found = secure_rounds.advance(session, current, config.phase_seconds, is_overdue=is_overdue)
    for row in repository.locked_live(session, round_id=current.id) if found.left_out else ():
        if row.client_id in found.left_out:
            _expire(session, row, found.left_out[row.client_id])
    if not found.is_over:
        return Step.WAIT
    if not found.survivors:
        ended = [row for row in rows if row.state in (AssignmentState.DECLINED, AssignmentState.EXPIRED)]
        lost = f" ({shortened(_reasons(ended))})" if ended else ""
        skip_round(session, run, current, f"no secure sum: {found.why}{lost}")
        return Step.CHECK_AGAIN
    _accept_survivors(session, current, found.survivors)
    message = f"aggregating {len(found.survivors)} of {len(rows)} updates"
    transition(session, current, RoundState.AGGREGATING, message)
    enqueue.wake_watchers(session)
    return Step.CHECK_AGAIN


def _accept_survivors(session: Session, current: Round, survivors: Sequence[str]) -> None:
    """Accept the masked vectors that are in the sum, and end the other assignments."""
    vectors = secure_rounds.vectors(session, current.id)
    for row in repository.locked_live(session, round_id=current.id):
        if row.client_id in survivors and row.state == AssignmentState.LEASED:
            data = {"update_digest": vectors[row.client_id]}
            submitted = Passed(AssignmentState.SUBMITTED, f"{row.client_id}: masked vector submitted", data)
            message = f"{row.client_id}: masked vector accepted"
            values: dict[str, Any] = {"update_digest": vectors[row.client_id], "closed_at": func.now()}
            transition(session, row, AssignmentState.ACCEPTED, message, via=submitted, **values)
        else:
            _expire(session, row, "the sum is complete without this client")


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


def _check_open_round(session: Session, run: Run, current: Round, spec: RunSpec, checked: CheckedInputs | None) -> Step:
    """Close an open round or offer it again when it is time, and return the caller's next step."""
    cohort = spec.cohort
    overdue = repository.is_overdue(session, current.id)
    enough = repository.has_enough(session, current)
    _end_lost(session, current, offer_again=not (overdue or enough))
    claims = repository.claims(session, current.id)
    if repository.has_live(session, current.id) and not (overdue or enough):
        if claims:
            return _check_inputs(session, run, current, checked) or _answer_claims(session, run, current, claims)
        _forget_failures(session, run)
        return Step.WAIT
    # Once nothing is live nothing more can be accepted, so the count below is final.
    late = f"the round closed with the first {current.num_wanted} updates: this client's came too late and is not used"
    _end_live(session, current, late if enough else "the round's deadline has passed")
    rows = repository.assignments(session, [current.id])
    members = {row.client_id for row in rows}
    accepted = {row.client_id for row in rows if row.state == AssignmentState.ACCEPTED}
    missing = members.intersection(clients.eligible(session, run.project, sorted(members - accepted)))
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
    if missing and (step := _check_inputs(session, run, current, checked)) is not None:
        return step
    ended = [row for row in rows if row.client_id not in accepted]
    attempts = {row.client_id: row.attempt for row in ended}
    if missing and run.num_tries:  # the coordinator was at fault until now, and that costs no attempt
        _forget_failures(session, run)
        again = {client: attempts[client] + 1 for client in sorted(missing)}
        return _offer_again(session, current, cohort, again, _reasons(ended), {}, costs_attempt=False)
    if first := _first_claims(session, current, claims):
        again = {client: attempts[client] + 1 for client in sorted(missing.intersection(first))}
        if again:
            return _offer_again(session, current, cohort, again, _reasons(ended), {}, costs_attempt=False)
    _refute(session, claims)
    reasons = _reasons(ended)
    if missing and current.attempt < cohort.max_attempts:  # a policy that was closed may be opened again
        again = {client: attempts[client] + 1 for client in sorted(missing)}
        newest = {row.client_id: row.state for row in rows}
        # Asked again at once, it would decline again: its attempts leave time for what it lacks to come back.
        pause = min(cohort.deadline_seconds / 10, LONGEST_PAUSE_SECONDS)
        pauses = {client: pause for client in again if newest[client] == AssignmentState.DECLINED}
        return _offer_again(session, current, cohort, again, reasons, pauses)
    return _without_quorum(session, run, current, cohort, reasons)


def _check_inputs(session: Session, run: Run, current: Round, checked: CheckedInputs | None) -> Step | None:
    """Return the step to take before clients are held responsible, or None if the coordinator's part is all right.

    No attempt of a round is counted before this: what is missing or damaged in the store is not the clients' fault,
    whatever they reported. The run stalls until it is back.
    """
    if checked is None or checked.round_id != current.id:
        return Step.CHECK_INPUTS if retries.may_begin(session, run) else Step.WAIT
    if not checked.faults:
        return None
    why = f"round {current.number} waits for the coordinator: {'; '.join(checked.faults)}; put it back into the store"
    retries.record_failure(session, run, why, begun=False)
    return Step.WAIT


def _answer_claims(session: Session, run: Run, current: Round, claims: Sequence[Assignment]) -> Step:
    """Offer work again that was declined because of the coordinator, whose part is now all right."""
    first = _first_claims(session, current, claims)
    again = {row.client_id: row.attempt + 1 for row in claims if run.num_tries or row.client_id in first}
    _refute(session, [row for row in claims if row.client_id not in again])
    if run.num_tries:  # the time that the fault took does not count against the round
        seconds = RunSpec.model_validate(run.spec).cohort.deadline_seconds
        repository.extend(session, current, seconds, next_attempt=False)
    _forget_failures(session, run)
    if again:
        repository.offer(session, current, again)
        declined = {row.client_id: row.reason or "" for row in claims if row.client_id in again}
        _record_offers(session, current, "the coordinator's files are all right now", declined)
    return Step.WAIT


def _first_claims(session: Session, current: Round, claims: Sequence[Assignment]) -> set[str]:
    """Return the clients that blame the coordinator for the first time in this round.

    The coordinator's part was found all right, but it may have been repaired in the meantime. So this time costs no
    attempt; from the next on it is the client's own problem.
    """
    return {row.client_id for row in claims if repository.num_claims(session, current.id, row.client_id) == 1}


def _refute(session: Session, claims: Sequence[Assignment]) -> None:
    """Count declined work as the client's own problem: it blamed the coordinator again, whose part is all right."""
    for row in claims:
        row.cause = Cause.CLIENT_MACHINE
        row.reason = printable(
            f"{row.reason}; the coordinator has it, undamaged: look at the client's machine or network"
        )
        record(session, "decline.refuted", f"{row.client_id}: {row.reason}", **about(row))
    session.flush()


def _forget_failures(session: Session, run: Run) -> None:
    """Clear the reason of an earlier check that failed, because this one has not."""
    if run.num_tries:
        retries.reset(session, run)
        run_rows.set_reason(session, run, None)
        enqueue.wake_watchers(session)


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
    *,
    costs_attempt: bool = True,
) -> Step:
    """Keep the updates of an attempt that ended without enough of them, and offer the other assignments again."""
    repository.extend(session, current, cohort.deadline_seconds, next_attempt=costs_attempt)
    repository.offer(session, current, attempts, pauses)
    _record_offers(session, current, f"attempt {current.attempt} of {cohort.max_attempts}", reasons)
    return Step.WAIT


def _record_offers(session: Session, current: Round, why: str, reasons: Mapping[str, str]) -> None:
    record(
        session,
        "round.reoffered",
        f"{why}, offered again: {shortened(reasons)}",
        run_id=current.run_id,
        round_number=current.number,
        data={"clients": dict(reasons)},
    )
    enqueue.wake_workers(session)
    enqueue.wake_watchers(session)


def _without_quorum(
    session: Session, run: Run, current: Round, cohort: CohortConfig, reasons: Mapping[str, str]
) -> Step:
    """End a round that has no attempt left, or the whole run: the spec chooses."""
    reason = f"too few updates after {current.attempt} attempts: {shortened(reasons)}"
    if unusual := repository.unusual_before(session, current):
        reason += f". Before it, the update of {', '.join(unusual)} was unusual: see the events update.unusual"
    end_without_result(session, run, current, cohort, reason)
    return Step.WAIT if run.state == RunState.FINISHED else Step.CHECK_AGAIN


def _reasons(rows: Sequence[Assignment]) -> dict[str, str]:
    """Return how and why each client's newest assignment ended."""
    return {row.client_id: row.reason or str(row.state) for row in rows}
