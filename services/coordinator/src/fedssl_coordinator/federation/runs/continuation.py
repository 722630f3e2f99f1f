"""Continues a completed run for further rounds, with its weights and its state on the coordinator.

The clients continue with their own states, if they still have them: a worker keeps them for some days after a run has
ended. One that has removed its state reports that, and `cohort.on_lost_state` decides what follows.
"""

from uuid import UUID

from sqlalchemy.orm import Session

from fedssl.protocol.runs import RunSpec
from fedssl.protocol.states import Outcome, RunState
from fedssl.wording import plural
from fedssl_coordinator.core import audit, enqueue
from fedssl_coordinator.core.models import Run
from fedssl_coordinator.core.problems import ProblemError
from fedssl_coordinator.core.run_documents import spec_of
from fedssl_coordinator.core.store import store
from fedssl_coordinator.federation import retries, run_rows
from fedssl_coordinator.federation.transitions import transition
from fedssl_coordinator.storage.artifacts import repository as artifacts

_INSTEAD = "start a new run from its weights instead, with model.initial.run in the spec"


def continue_run(session: Session, run: Run, num_rounds: int) -> None:
    """Train a completed run further, until it has `num_rounds` rounds. Does nothing if it has that number already.

    The caller holds the run's lock. Raises ProblemError.
    """
    if num_rounds == run.num_rounds and run.outcome in (None, Outcome.COMPLETED):
        return
    _require_completed(run)
    try:
        spec = spec_of(run).continued(num_rounds)
    except ValueError as error:
        raise ProblemError("conflict", f"run {run.id} cannot be continued: {error}; {_INSTEAD}") from error
    for digest in (run.broadcast, run.server_state, run.frozen):
        if digest is not None and not (artifacts.hold(session, digest) and digest in store()):
            detail = (
                f"run {run.id} cannot be continued: artifact {digest}, which it ended with, is no longer in the store; "
                "restore it from a backup, or submit a new run"
            )
            raise ProblemError("conflict", detail)
    won = transition(
        session,
        run,
        RunState.RUNNING,
        f"continued after its {plural(run.num_rounds, 'round')}, until it has {num_rounds}",
        data={audit.NUM_ROUNDS_BEFORE: run.num_rounds, "num_rounds": num_rounds},
        num_rounds=num_rounds,
        spec=spec.model_dump(mode="json"),
        outcome=None,
        reason=None,
        finished_at=None,
        **retries.NO_TRIES,
    )
    assert won, "the run is locked"
    enqueue.advance(session, run.id)
    enqueue.wake_workers(session)


def as_created(session: Session, run: Run) -> RunSpec:
    """Return the spec with which a run was created: it may have been continued since."""
    spec = spec_of(run)
    before = audit.first_num_rounds(session, run.id)
    return spec if before is None else spec.model_copy(update={"num_rounds": before})


def not_found(session: Session, run_id: UUID) -> ProblemError:
    """Return the error for a run that does not exist, or no longer does."""
    if not audit.was_deleted(session, run_id):
        return run_rows.not_found(run_id)
    detail = f"run {run_id} was deleted, with its weights and its state: it cannot be continued, submit a new run"
    return ProblemError("not-found", detail)


def _require_completed(run: Run) -> None:
    if run.outcome == Outcome.COMPLETED:
        return
    if run.outcome == Outcome.FAILED:
        why = f"it failed after {run.rounds_closed} of {plural(run.num_rounds, 'round')}: resume it first"
    elif run.outcome == Outcome.STOPPED:
        why = f"an operator stopped it after {plural(run.rounds_closed, 'round')}: {_INSTEAD}"
    else:
        closed = f"{run.rounds_closed} of {plural(run.num_rounds, 'round')}"
        why = f"it is {run.state}, and has closed {closed}: wait until it ends"
    raise ProblemError("conflict", f"run {run.id} cannot be continued: {why}")
