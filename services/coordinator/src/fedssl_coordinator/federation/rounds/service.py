"""Decides a run's next step from Postgres only. Everything here is quick: the aggregator computes.

A transaction that changes a run or one of its rounds holds the run's row lock from its first line on, so that an
operator's stop and an aggregator's close cannot cross.
"""

from uuid import UUID

from sqlalchemy.orm import Session

from fedssl.protocol.states import Outcome, RoundState, RunState
from fedssl_coordinator.core import enqueue
from fedssl_coordinator.core.models import Run
from fedssl_coordinator.core.run_documents import spec_of
from fedssl_coordinator.federation import retries, run_rows
from fedssl_coordinator.federation.distillation import service as distillation
from fedssl_coordinator.federation.rounds import closing, collecting, opening, repository, secure
from fedssl_coordinator.federation.rounds.steps import CheckedInputs, NextVector, Step
from fedssl_coordinator.federation.transitions import pause


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
    spec = spec_of(run)
    if run.plan is None:
        if num_epochs := spec.method.distillation_epochs(0):
            distillation.ensure_queued(session, run, 0, num_epochs)
            return Step.WAIT
        return _begin(session, run, Step.PREPARE)
    current = repository.unclosed(session, run_id)
    if current is None:
        if run.rounds_closed >= run.num_rounds:
            closing.end_run(session, run, Outcome.COMPLETED, _reason_of_completed(session, run))
            return Step.WAIT
        if spec.secure_aggregation is not None and vector is None:
            return Step.COUNT_WORDS
        return opening.open_next(session, run, spec, vector)
    if current.state == RoundState.AGGREGATING:
        return _begin(session, run, Step.AGGREGATE)
    if current.state == RoundState.DISTILLING:
        num_epochs = spec.method.distillation_epochs(current.number)
        distillation.ensure_queued(session, run, current.number, num_epochs)
        return Step.WAIT
    if spec.secure_aggregation is not None:
        return secure.check_secure_round(session, run, current, spec.secure_aggregation)
    return collecting.check_open_round(session, run, current, spec, checked)


def record_failure(session: Session, run_id: UUID, why: str, *, begun: bool) -> None:
    """Pause a run if a computation that `next_step` began, or that step itself, failed for a temporary reason."""
    run = run_rows.locked(session, run_id)
    if run is not None and run.state != RunState.FINISHED:
        retries.record_failure(session, run, why, begun=begun)


def _reason_of_completed(session: Session, run: Run) -> str:
    """Return the reason of a run whose rounds are all closed, with how many of them gave no new weights."""
    is_only = run.num_rounds == 1
    reason = "the only round is closed" if is_only else f"all {run.num_rounds:,} rounds are closed"
    without = repository.num_without_weights(session, run.id)
    if not without:
        return reason
    verdicts = ", ".join(f"{number} {verdict}" for verdict, number in without.items())
    which = "" if is_only else f"{sum(without.values())} of them "
    return f"{reason}, {which}without new weights ({verdicts})"


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
