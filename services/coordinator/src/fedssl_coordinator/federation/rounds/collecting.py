"""Moves an open round forward: closes it, offers it again or waits."""

from collections.abc import Mapping, Sequence

from sqlalchemy.orm import Session

from fedssl.protocol.runs import RunSpec
from fedssl.protocol.states import AssignmentState, Cause, RoundState, RunState
from fedssl.protocol.training import CohortConfig
from fedssl.wording import plural
from fedssl_coordinator.core import enqueue
from fedssl_coordinator.core.audit import record
from fedssl_coordinator.core.models import Assignment, Round, Run
from fedssl_coordinator.core.problems import printable
from fedssl_coordinator.core.run_documents import spec_of
from fedssl_coordinator.federation import retries, run_rows
from fedssl_coordinator.federation.distillation import service as distillation
from fedssl_coordinator.federation.retries import LONGEST_PAUSE_SECONDS
from fedssl_coordinator.federation.rounds import closing, fitness, policies, repository
from fedssl_coordinator.federation.rounds.assignments import end_live, expire, reasons_of, record_offers
from fedssl_coordinator.federation.rounds.fitness import shortened
from fedssl_coordinator.federation.rounds.steps import CheckedInputs, Step
from fedssl_coordinator.federation.transitions import about, transition
from fedssl_coordinator.identity import clients


def check_open_round(session: Session, run: Run, current: Round, spec: RunSpec, checked: CheckedInputs | None) -> Step:
    """Close an open round or offer it again when it is time, and return the caller's next step."""
    is_overdue = repository.is_overdue(session, current.id)
    has_enough = repository.has_enough(session, current)
    is_over = is_overdue or has_enough
    _end_lost(session, current, offer_again=not is_over)
    claims = repository.claims(session, current.id)
    is_live = repository.has_live(session, current.id)
    if is_live and not is_over:
        if claims:
            return _check_inputs(session, run, current, checked) or _answer_claims(session, run, current, claims)
        _forget_failures(session, run)
        return Step.WAIT
    # If no assignment is live, no further update can be accepted, so the count below is final.
    if is_live:
        late = (
            f"the round closed with the first {current.num_wanted} updates: this client's came too late and is not used"
        )
        end_live(session, current, late if has_enough else "the round's deadline has passed")
    rows = repository.assignments(session, [current.id])
    members = {row.client_id for row in rows}
    accepted = {row.client_id for row in rows if row.state == AssignmentState.ACCEPTED}
    missing = clients.eligible(session, run.project, sorted(members - accepted))
    refused = policies.refusals(session, run, spec, missing)
    left_out = refused | fitness.unfit(session, spec, run.method_version, missing)
    num_possible = len(accepted) + sum(client not in left_out for client in missing)
    if len(accepted) >= _quorum(spec.cohort, current, num_possible):
        return _begin_aggregating(session, run, current, spec, f"{len(accepted)} of {plural(len(members), 'update')}")
    if missing and (step := _check_inputs(session, run, current, checked)) is not None:
        return step
    ended = [row for row in rows if row.client_id not in accepted]
    if not _offer_again(session, run, current, spec.cohort, ended, missing, claims):
        _end_without_quorum(session, run, current, spec.cohort, reasons_of(ended))
        return Step.WAIT if run.state == RunState.FINISHED else Step.CHECK_AGAIN
    return Step.WAIT


def _begin_aggregating(session: Session, run: Run, current: Round, spec: RunSpec, updates: str) -> Step:
    """Close the round to updates: the aggregator is to compute its result, or queue the training on them."""
    transition(session, current, RoundState.AGGREGATING, f"aggregating {updates}")
    enqueue.wake_watchers(session)
    num_epochs = spec.method.distillation_epochs(current.number)
    if not num_epochs:
        return Step.CHECK_AGAIN
    message = f"training for {plural(num_epochs, 'epoch')} on the updates"
    transition(session, current, RoundState.DISTILLING, message)
    distillation.ensure_queued(session, run, current.number, num_epochs)
    return Step.WAIT


def _offer_again(
    session: Session,
    run: Run,
    current: Round,
    cohort: CohortConfig,
    ended: Sequence[Assignment],
    missing: Sequence[str],
    claims: Sequence[Assignment],
) -> bool:
    """Offer the round to the `missing` clients again, keeping the updates that it has. Return False if it ends.

    `ended`: the assignments of all clients without an accepted update. An attempt for which the coordinator was at
    fault does not count.
    """
    newest = {row.client_id: row for row in ended}
    again = {client: newest[client].attempt + 1 for client in missing}
    first = again.keys() if run.num_tries else _first_claims(session, current, claims)
    free = {client: attempt for client, attempt in again.items() if client in first}
    if free:
        _forget_failures(session, run)
        repository.extend(session, current, cohort.deadline_seconds, next_attempt=False)
        repository.offer(session, current, free)
    else:
        _refute(session, claims)
        if not missing or current.attempt >= cohort.max_attempts:
            return False
        # A client that is asked again at once would decline again. The pauses leave time to restore what it lacks.
        pause = min(cohort.deadline_seconds / 10, LONGEST_PAUSE_SECONDS)
        pauses = {client: pause for client in again if newest[client].state == AssignmentState.DECLINED}
        repository.extend(session, current, cohort.deadline_seconds, next_attempt=True)
        repository.offer(session, current, again, pauses)
    record_offers(session, current, f"attempt {current.attempt} of {cohort.max_attempts}", reasons_of(ended))
    return True


def _check_inputs(session: Session, run: Run, current: Round, checked: CheckedInputs | None) -> Step | None:
    """Return the step to take before clients are held responsible, or None if the coordinator's part is all right.

    No attempt of a round is counted before this: what is missing or damaged in the store is not the clients' fault,
    whatever they reported. The run stalls until it is restored.
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
    if run.num_tries:  # the duration of the fault does not count against the round
        seconds = spec_of(run).cohort.deadline_seconds
        repository.extend(session, current, seconds, next_attempt=False)
    _forget_failures(session, run)
    if again:
        repository.offer(session, current, again)
        declined = {row.client_id: row.reason or "" for row in claims if row.client_id in again}
        record_offers(session, current, "the coordinator's files are all right now", declined)
    return Step.WAIT


def _first_claims(session: Session, current: Round, claims: Sequence[Assignment]) -> set[str]:
    """Return the clients that blame the coordinator for the first time in this round.

    The coordinator's part was found all right, but it may have been repaired in the meantime. So the first time does
    not count as an attempt; from the second on, it is the client's own problem.
    """
    return {row.client_id for row in claims if repository.num_claims(session, current.id, row.client_id) == 1}


def _refute(session: Session, claims: Sequence[Assignment]) -> None:
    """Count declined work as the client's own problem: it blamed the coordinator again, which is not at fault."""
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
        expire(session, assignment, reason, "; offered again" if offered else "")
    if again:
        repository.offer(session, current, again)
        enqueue.wake_workers(session)


def _end_without_quorum(
    session: Session, run: Run, current: Round, cohort: CohortConfig, reasons: Mapping[str, str]
) -> None:
    """End a round that has no attempt left, or the whole run: the spec chooses."""
    reason = f"too few updates after {plural(current.attempt, 'attempt')}: {shortened(reasons)}"
    if unusual := repository.unusual_before(session, current):
        reason += f". Before it, the update of {', '.join(unusual)} was unusual: see the events update.unusual"
    closing.end_without_result(session, run, current, cohort, reason)
