"""Celery tasks. They take ids and read everything again, so that one may run twice or not at all without harm."""

import time
from collections.abc import Callable
from typing import Any
from uuid import UUID

import structlog
from celery.exceptions import WorkerShutdown
from celery.signals import worker_ready
from redis.exceptions import RedisError
from sqlalchemy import Connection

from fedssl.errors import FedSSLError
from fedssl_coordinator.core.celery_app import AGGREGATE, DISTILL, EVALUATE, app
from fedssl_coordinator.core.db import UNREACHABLE, exclusive, transaction
from fedssl_coordinator.core.logs import say_about
from fedssl_coordinator.core.metrics import TASK_FAILURES
from fedssl_coordinator.core.models import DistillationJob, Evaluation, Job
from fedssl_coordinator.core.queues import queue_depths
from fedssl_coordinator.core.settings import settings
from fedssl_coordinator.federation.distillation import repository as distillation
from fedssl_coordinator.federation.jobs import repository as job_rows
from fedssl_coordinator.federation.jobs import service as jobs
from fedssl_coordinator.federation.rounds import repository, service
from fedssl_coordinator.federation.rounds.steps import Step
from fedssl_coordinator.notifications import delivery
from fedssl_coordinator.storage.retention import collection as retention

log = structlog.get_logger(__name__)

_COMPUTED = (Step.PREPARE, Step.AGGREGATE)
_last_sweep = float("-inf")  # seconds of this process's own clock

# What needs torch is imported inside the functions: a process whose queue is idle stays small.


@app.task(name="fedssl.advance_run")  # type: ignore[untyped-decorator]
def advance_run(run_id: str) -> None:
    """Move one run as far as possible: prepare it, open a round, aggregate, close the round, open the next."""

    def advance(connection: Connection) -> None:
        say_about(run=run_id)
        while _advance(UUID(run_id)):
            pass

    _exclusively(f"run/{run_id}", advance)


@app.task(name="fedssl.begin_mean")  # type: ignore[untyped-decorator]
def begin_mean(run_id: str) -> None:
    """Add the updates that have arrived to the mean of the run's open round. If this fails, the close does it."""
    from fedssl_coordinator.aggregator.begun_means import begin_mean
    from fedssl_coordinator.aggregator.device import set_threads

    say_about(run=run_id)
    set_threads()
    try:
        begin_mean(UUID(run_id))
    except (*UNREACHABLE, FedSSLError, OSError, ValueError) as error:
        log.warning("mean.not_begun", error=f"{type(error).__name__}: {error}", consequence="the close reads it again")


@app.task(name="fedssl.distil")  # type: ignore[untyped-decorator]
def distil(job_id: str) -> None:
    """Work on one distillation job to its end, from where the last attempt left it."""

    def work(connection: Connection) -> None:
        from fedssl_coordinator.aggregator.distillation import distil

        distil(connection, UUID(job_id))

    _work_on(DistillationJob, UUID(job_id), work, task="distil")


@app.task(name="fedssl.evaluate")  # type: ignore[untyped-decorator]
def evaluate(evaluation_id: str) -> None:
    """Evaluate one round's encoder, from the measure at which the last attempt left it."""

    def work(connection: Connection) -> None:
        from fedssl_coordinator.aggregator.evaluations import evaluate

        evaluate(connection, UUID(evaluation_id))

    _work_on(Evaluation, UUID(evaluation_id), work, task="evaluate")


@app.task(name="fedssl.compute_plan")  # type: ignore[untyped-decorator]
def compute_plan(digest: str) -> None:
    """Compute the artifact plan of a spec that is not a run yet, for an estimate."""
    from fedssl_coordinator.aggregator import plans

    try:
        plans.compute(digest)
    except RedisError as error:
        log.warning("redis.unreachable", error=type(error).__name__, consequence="an estimate has no bytes")


@app.task(name="fedssl.sweep", bind=True)  # type: ignore[untyped-decorator]
def sweep(task: Any) -> None:
    """Find everything that waits for an aggregator, and send a task for each. This makes a lost message harmless.

    Sweeps that have piled up behind a long task run as one.
    """
    global _last_sweep
    if not task.request.called_directly:
        if time.monotonic() - _last_sweep < settings().sweep_seconds / 2:
            return
        _last_sweep = time.monotonic()
    if not (depths := queue_depths()):
        return  # nothing could be sent
    try:
        with transaction() as session:
            runs = repository.needing_attention(session)
            distillations = distillation.select_due_notifications(session, depths[DISTILL])
            evaluations = job_rows.select_due_notifications(session, Evaluation, depths[EVALUATE])
    except UNREACHABLE as error:
        log.warning("postgres.unreachable", error=type(error).__name__, consequence="the next sweep will check")
        return
    for run_id in runs:
        advance_run.delay(str(run_id))
    for job_id in distillations:
        distil.delay(str(job_id))
    for evaluation_id in evaluations:
        evaluate.delay(str(evaluation_id))


@app.task(name="fedssl.notify")  # type: ignore[untyped-decorator]
def notify() -> None:
    """Deliver the notifications that are due. Passes that have piled up behind a long one find nothing to do."""
    try:
        delivery.record_stalled()
        delivery.deliver_due()
    except UNREACHABLE as error:
        log.warning("postgres.unreachable", error=type(error).__name__, consequence="the next pass will deliver")


@app.task(name="fedssl.collect")  # type: ignore[untyped-decorator]
def collect() -> None:
    """Remove the artifacts that nothing needs any more from the store."""
    try:
        collected = retention.collect()
    except UNREACHABLE as error:
        log.warning("postgres.unreachable", error=type(error).__name__, consequence="the next collection will do it")
        return
    except OSError as error:
        log.error("store.failed", error=str(error), consequence="the next collection will do it")
        return
    if collected is None:
        log.info("busy", name=retention.LOCK, consequence="the next collection will do it")
    else:
        kinds, num_bytes = dict(collected.counts), collected.num_bytes.total()
        log.info("artifacts.collected", count=collected.counts.total(), bytes=num_bytes, kinds=kinds)


def _exclusively(name: str, work: Callable[[Connection], None]) -> None:
    """Do the work unless another process does it at this time. The sweep will find what is left undone."""
    try:
        with exclusive(name) as connection:
            if connection is None:
                log.info("busy", name=name, consequence="another process works on it; the sweep will check again")
            else:
                work(connection)
    except UNREACHABLE as error:
        log.warning("postgres.unreachable", error=type(error).__name__, consequence="the sweep will check again")


def _advance(run_id: UUID) -> bool:
    """Take one step. Returns False if there is nothing more to do now. A failure is recorded with its run only."""
    step = None
    try:
        with transaction() as session:
            step = service.next_step(session, run_id)
        if step is Step.CHECK_INPUTS:
            step = _check_inputs(run_id)
        if step is Step.COUNT_WORDS:
            step = _count_words(run_id)
        if step in _COMPUTED:
            _compute(run_id, step)
    except UNREACHABLE:
        raise
    except Exception as error:
        log.exception("run.stalled", run=str(run_id))
        TASK_FAILURES.labels("advance_run").inc()
        with transaction() as session:
            service.record_failure(session, run_id, f"{type(error).__name__}: {error}", begun=step in _COMPUTED)
        return False
    return step is not Step.WAIT


@worker_ready.connect  # type: ignore[untyped-decorator]
def _warm_up(sender: Any, **_: object) -> None:
    """Load what the first aggregation needs while the process is idle. The first task of another queue can wait for
    its imports, so an idle process of that queue stays small."""
    if AGGREGATE in sender.app.amqp.queues.consume_from:
        import fedssl_coordinator.aggregator.rounds  # noqa: F401


def _check_inputs(run_id: UUID) -> Step:
    """Check what the round's clients get, and take the step that follows."""
    from fedssl_coordinator.aggregator.inputs import check_inputs

    checked = check_inputs(run_id)
    with transaction() as session:
        return service.next_step(session, run_id, checked)


def _count_words(run_id: UUID) -> Step:
    """Count the words of each client's masked vector in the next round, and take the step that follows."""
    from fedssl_coordinator.aggregator.secure_rounds import next_vector

    vector = next_vector(run_id)
    with transaction() as session:
        return service.next_step(session, run_id, vector=vector)


def _compute(run_id: UUID, step: Step) -> None:
    from fedssl_coordinator.aggregator import rounds
    from fedssl_coordinator.aggregator.device import set_threads

    set_threads()
    if step is Step.PREPARE:
        rounds.prepare(run_id)
    else:
        rounds.aggregate(run_id)


def _work_on(table: type[Job], job_id: UUID, work: Callable[[Connection], None], *, task: str) -> None:
    """Work on a job under its lock, and record a failure.

    If the device has failed, this process ends: it could not use the device any more, and a new process can.
    """

    def attempt(connection: Connection) -> None:
        from torch import AcceleratorError

        try:
            work(connection)
        except UNREACHABLE:
            raise
        except Exception as error:
            log.exception(f"{table.kind}.stalled", job=str(job_id))
            TASK_FAILURES.labels(task).inc()
            with transaction() as session:
                jobs.record_failure(session, table, job_id, f"{type(error).__name__}: {error}")
            if isinstance(error, AcceleratorError):
                raise WorkerShutdown(1) from error

    _exclusively(job_rows.lock_name(table, job_id), attempt)
