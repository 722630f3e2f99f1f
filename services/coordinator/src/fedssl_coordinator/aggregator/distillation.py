"""Runs a distillation job. It imports torch, so only the process that trains imports it.

Everything is written on the connection that holds the job's lock: a process that has lost the lock, and so may have a
successor, cannot write any more. No transaction is open during the training.
"""

from collections.abc import Mapping
from uuid import UUID

import structlog
from sqlalchemy import Connection

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
from fedssl_coordinator.core.models import Assignment, DistillationJob, Round
from fedssl_coordinator.federation.distillation import service
from fedssl_coordinator.federation.jobs import service as jobs
from fedssl_coordinator.federation.jobs.service import StartedJob
from fedssl_coordinator.federation.rounds import closing, reopening
from fedssl_coordinator.federation.rounds import repository as rounds

log = structlog.get_logger(__name__)


def distil(connection: Connection, job_id: UUID) -> None:
    """Work on a job whose lock `connection` holds, from where the last try left it, and publish the weights.

    If it is killed at any moment and called again, it gives the same bits. Exceptions are failures that may pass.
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
        _ask_again(connection, job_id, current, lost)
    except CheckpointMismatch as error:
        with transaction(connection) as session:
            service.drop_checkpoint(session, job_id, str(error))
    except TooFewUpdates as error:
        _end_without_result(connection, job_id, rows, error)
    except (MethodError, SpecError) as error:
        _fail(connection, job_id, str(error))
    except DataError as error:
        if current is not None:  # missing images may come back, and with them the weights of weeks of training
            raise
        _fail(connection, job_id, str(error))
    else:
        _publish(connection, job_id, current, rows, weights)


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


def _publish(
    connection: Connection, job_id: UUID, current: Round | None, rows: list[Assignment], weights: Weights
) -> None:
    """Publish the new weights, close the round and complete the job in one transaction."""
    with transaction(connection) as session:
        if (found := service.still_running(session, job_id)) is None:
            return
        run, job = found
        service.complete(session, job)
        if current is None:
            rounds_compute.publish_first(session, run, weights)
        else:
            due = rounds.unclosed(session, run.id)
            assert due is not None, "a job is unfinished while its round is"
            assert (due.id, due.state) == (current.id, RoundState.DISTILLING)
            rounds_compute.publish_next(session, run, due, rows, weights)
        enqueue.advance(session, run.id)


def _end_without_result(connection: Connection, job_id: UUID, rows: list[Assignment], error: TooFewUpdates) -> None:
    """End the job, and its round or the run, because too few updates can be used."""
    with transaction(connection) as session:
        if (found := service.still_running(session, job_id)) is None:
            return
        run, job = found
        service.fail(session, job, str(error))
        due = rounds.unclosed(session, run.id)
        assert due is not None, "a job is unfinished while its round is"
        rounds_compute.end_without_result(session, run, due, rows, error)
        enqueue.advance(session, run.id)


def _ask_again(connection: Connection, job_id: UUID, current: Round, lost: Mapping[UUID, str]) -> None:
    """End the job, and ask the clients again whose updates the store has lost. The round gets another job."""
    with transaction(connection) as session:
        if (found := service.still_running(session, job_id)) is None:
            return
        run, _ = found
        service.end_unfinished(session, run, "updates were lost in the store, and are asked for again")
        due = rounds.unclosed(session, run.id)
        assert due is not None, "a job is unfinished while its round is"
        assert (due.id, due.state) == (current.id, RoundState.DISTILLING)
        reopening.ask_again(session, run, due, lost)


def _fail(connection: Connection, job_id: UUID, reason: str) -> None:
    """End the job, and with it a run that can never continue."""
    with transaction(connection) as session:
        if (found := service.still_running(session, job_id)) is None:
            return
        run, job = found
        service.fail(session, job, reason)
        about = f"round {job.round_number}: {reason}" if job.round_number else reason
        closing.end_run(session, run, Outcome.FAILED, about)
