"""Reopens rounds of a run that had failed, or whose updates were lost. The caller holds the run's lock."""

from collections.abc import Mapping
from uuid import UUID

from sqlalchemy.orm import Session

from fedssl.protocol.states import AssignmentState, RoundState, RunState, Verdict
from fedssl_coordinator.core import enqueue
from fedssl_coordinator.core.models import Round, Run
from fedssl_coordinator.core.problems import ProblemError
from fedssl_coordinator.core.run_documents import spec_of
from fedssl_coordinator.federation import retries, run_rows
from fedssl_coordinator.federation.rounds import fitness, policies, repository
from fedssl_coordinator.federation.rounds.assignments import expire, reasons_of, record_offers
from fedssl_coordinator.federation.rounds.closing import count_without_weights
from fedssl_coordinator.federation.rounds.fitness import shortened
from fedssl_coordinator.federation.transitions import transition
from fedssl_coordinator.identity import clients
from fedssl_coordinator.storage.artifacts import repository as artifacts


def take_up(session: Session, run: Run) -> None:
    """Resume a failed run from its last closed round. The caller holds the run's lock.

    The round in which it failed is open again: its accepted updates count, and the other clients are asked again.
    Raises ProblemError if the run's weights were removed.
    """
    for digest in (run.broadcast, run.server_state, run.frozen):
        if digest is not None and not artifacts.hold(session, digest):
            detail = f"run {run.id} cannot be resumed: its weights, artifact {digest}, were removed from the store"
            raise ProblemError("conflict", detail)
    data = {"outcome": run.outcome, "reason": run.reason, "rounds_closed": run.rounds_closed}
    message = f"resumed after round {run.rounds_closed}, although it had failed: {run.reason}"
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
            count_without_weights(session, run)  # a secure round has one attempt
        else:
            _reopen(session, run, failed)
    enqueue.advance(session, run.id)
    enqueue.wake_workers(session)


def _reopen(session: Session, run: Run, failed: Round) -> None:
    """Reopen the round in which a run had failed. Its assignments stay as they ended."""
    spec = spec_of(run)
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
                expire(session, row, "the client was revoked")
            elif not artifacts.hold(session, row.update_digest):
                expire(session, row, "its update was removed from the store while the run had ended")
            else:
                kept.add(row.client_id)
    others = sorted(eligible - kept)
    left_out = fitness.unfit(session, spec, run.method_version, others) | policies.refusals(session, run, spec, others)
    attempts = {row.client_id: row.attempt for row in rows}
    asked = sorted(eligible - kept - left_out.keys())
    repository.offer(session, failed, {client: attempts[client] + 1 for client in asked})
    if asked:
        ends = reasons_of(rows)
        record_offers(session, failed, "the run was resumed", {client: ends[client] for client in asked})


def ask_again(session: Session, run: Run, current: Round, lost: Mapping[UUID, str]) -> None:
    """Reopen a round whose accepted updates the store has partly lost, and ask only their clients again.

    `lost` has the reason per assignment. The round's time starts from the beginning, and no attempt is counted. The
    caller holds the run's lock.
    """
    rows = repository.assignments(session, [current.id])
    reasons = {row.client_id: lost[row.id] for row in rows if row.id in lost}
    message = f"asked again: {shortened(reasons)}"
    won = transition(session, current, RoundState.OPEN, message, data={"clients": reasons})
    assert won, "the run is locked, and its rounds with it"
    repository.extend(session, current, spec_of(run).cohort.deadline_seconds, next_attempt=False)
    for row in rows:
        if row.id in lost:
            expire(session, row, lost[row.id], "; asked again", update_digest=None)
    repository.offer(session, current, {row.client_id: row.attempt + 1 for row in rows if row.client_id in reasons})
    retries.reset(session, run)
    run_rows.set_reason(session, run, f"round {current.number}: {message}")
    enqueue.wake_workers(session)
    enqueue.wake_watchers(session)
