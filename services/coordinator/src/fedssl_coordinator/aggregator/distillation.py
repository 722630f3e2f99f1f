"""Runs a distillation job. It imports torch, so only the process that trains imports it.

Everything is written on the connection that holds the job's lock: a process that has lost the lock, and so may have a
successor, cannot write any more. No transaction is open during the training.
"""

from collections.abc import Callable, Mapping
from functools import partial
from uuid import UUID

import structlog
from sqlalchemy import Connection
from sqlalchemy.orm import Session

from fedssl import tracing
from fedssl.engine.norm_bounding import TooFewUpdates
from fedssl.errors import Cancelled, CheckpointMismatch, DataError, MethodError, SpecError
from fedssl.protocol.states import Outcome, RoundState
from fedssl_coordinator.aggregator import rounds as rounds_compute
from fedssl_coordinator.aggregator.device import chosen_device, free_cached, set_threads
from fedssl_coordinator.aggregator.distillation_checkpoints import Training
from fedssl_coordinator.aggregator.rounds import Weights
from fedssl_coordinator.aggregator.updates import UpdateLost
from fedssl_coordinator.core import enqueue
from fedssl_coordinator.core.db import transaction
from fedssl_coordinator.core.logs import say_about
from fedssl_coordinator.core.models import Assignment, DistillationJob, Round, Run
from fedssl_coordinator.federation.distillation import service
from fedssl_coordinator.federation.jobs import service as jobs
from fedssl_coordinator.federation.jobs.service import StartedJob
from fedssl_coordinator.federation.rounds import closing, reopening
from fedssl_coordinator.federation.rounds import repository as rounds

log = structlog.get_logger(__name__)


def distil(connection: Connection, job_id: UUID) -> None:
    """Work on a job whose lock `connection` holds, from where the last attempt left it, and publish the weights.

    If it is killed at any moment and called again, it gives the same bits. Exceptions are temporary failures.
    """
    with transaction(connection) as session:
        started = service.begin(session, job_id)
        if started is None:
            return
        current = rounds.unclosed(session, started.run.id)
        rows = [] if current is None else list(rounds.assignments(session, [current.id]))
    training = Training(connection, started)
    say_about(run=str(started.run.id), round=started.job.round_number)
    try:
        with tracing.round_span("distil", started.run.id, started.job.round_number):
            weights = _train(started, current, rows, training)
    except Cancelled as error:
        log.info("distillation.left", job=str(job_id), reason=str(error))
        if training.is_leaving:
            with transaction(connection) as session:
                jobs.record_departure(session, DistillationJob, job_id)
    except UpdateLost as error:
        assert current is not None, "before the first round there are no updates"
        if not (lost := rounds_compute.lost_updates(rows, error)):
            raise
        _end(connection, job_id, partial(_ask_again, current=current, lost=lost))
    except CheckpointMismatch as error:
        with transaction(connection) as session:
            service.drop_checkpoint(session, job_id, str(error))
    except TooFewUpdates as error:
        assert current is not None, "before the first round there are no updates"
        _end(connection, job_id, partial(_end_without_result, current=current, rows=rows, error=error))
    except (MethodError, SpecError) as error:
        _end(connection, job_id, partial(_fail, reason=str(error)))
    except DataError as error:
        if current is not None:  # missing images may come back, and with them the weights of weeks of training
            raise
        _end(connection, job_id, partial(_fail, reason=str(error)))
    else:
        _end(connection, job_id, partial(_publish, current=current, rows=rows, weights=weights))


def _train(
    started: StartedJob[DistillationJob], current: Round | None, rows: list[Assignment], training: Training
) -> Weights:
    set_threads()
    device, run = chosen_device(), started.run
    try:
        if current is None:
            return rounds_compute.first_weights(run, device, on_epoch=training.on_epoch, checkpoint=training)
        return rounds_compute.next_weights(run, current, rows, device, on_epoch=training.on_epoch, checkpoint=training)
    finally:
        free_cached()


def _end(connection: Connection, job_id: UUID, end: Callable[[Session, Run, DistillationJob], None]) -> None:
    """Call `end` in one transaction, with the job and its run, unless the job was cancelled."""
    with transaction(connection) as session:
        if (found := service.still_running(session, job_id)) is not None:
            end(session, *found)


def _due(session: Session, current: Round) -> Round:
    """Return the round of a job that is still running, in `session`."""
    due = rounds.get_one(session, current.id)
    assert due.state == RoundState.DISTILLING, "a job is unfinished while its round is"
    return due


def _publish(
    session: Session, run: Run, job: DistillationJob, *, current: Round | None, rows: list[Assignment], weights: Weights
) -> None:
    """Publish the new weights, close the round and complete the job."""
    service.complete(session, job)
    if current is None:
        rounds_compute.publish_first(session, run, weights)
    else:
        rounds_compute.publish_next(session, run, _due(session, current), rows, weights)
    enqueue.advance(session, run.id)


def _end_without_result(
    session: Session, run: Run, job: DistillationJob, *, current: Round, rows: list[Assignment], error: TooFewUpdates
) -> None:
    """End the job, and its round or the run, because too few updates can be used."""
    service.fail(session, job, str(error))
    rounds_compute.end_without_result(session, run, _due(session, current), rows, error)
    enqueue.advance(session, run.id)


def _ask_again(session: Session, run: Run, _: DistillationJob, *, current: Round, lost: Mapping[UUID, str]) -> None:
    """End the job, and reoffer the round to clients whose updates the store has lost. The round gets another job."""
    service.end_unfinished(session, run, "updates were lost in the store, and are asked for again")
    reopening.ask_again(session, run, _due(session, current), lost)


def _fail(session: Session, run: Run, job: DistillationJob, *, reason: str) -> None:
    """End the job, and with it a run that can never continue."""
    service.fail(session, job, reason)
    about = f"round {job.round_number}: {reason}" if job.round_number else reason
    closing.end_run(session, run, Outcome.FAILED, about)
