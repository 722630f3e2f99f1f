"""Celery tasks. They take ids, re-read everything, and may run twice or not at all without harm."""

import time
from collections.abc import Callable
from typing import Any
from uuid import UUID

import structlog
from celery.exceptions import WorkerShutdown
from celery.signals import worker_ready
from sqlalchemy import Connection

from fedssl_coordinator.core.celery_app import AGGREGATE, DISTILL, EVALUATE, app
from fedssl_coordinator.core.db import UNREACHABLE, exclusive, transaction
from fedssl_coordinator.core.enqueue import queue_depths
from fedssl_coordinator.core.logs import say_about
from fedssl_coordinator.core.metrics import TASK_FAILURES
from fedssl_coordinator.core.settings import settings
from fedssl_coordinator.federation.distillation import repository as jobs
from fedssl_coordinator.federation.distillation import service as distillation
from fedssl_coordinator.federation.evaluations import repository as judgements
from fedssl_coordinator.federation.evaluations import service as evaluations
from fedssl_coordinator.federation.rounds import repository, service
from fedssl_coordinator.federation.rounds.service import Step
from fedssl_coordinator.storage.retention import collection as retention

log = structlog.get_logger(__name__)

_last_sweep = float("-inf")  # seconds of this process's own clock


@app.task(name="fedssl.advance_run")  # type: ignore[untyped-decorator]
def advance_run(run_id: str) -> None:
    """Move one run as far as it goes: prepare it, open a round, aggregate, close, open the next."""

    def advance(connection: Connection) -> None:
        say_about(run=run_id)
        while _advance(UUID(run_id)):
            pass

    _alone(f"run/{run_id}", advance)


@app.task(name="fedssl.distil")  # type: ignore[untyped-decorator]
def distil(job_id: str) -> None:
    """Work on one distillation job to its end, from where the last try left it."""
    _alone(distillation.lock_name(UUID(job_id)), lambda connection: _distil(connection, UUID(job_id)))


@app.task(name="fedssl.evaluate")  # type: ignore[untyped-decorator]
def evaluate(evaluation_id: str) -> None:
    """Judge one round's encoder, from the measure at which the last try left it."""
    identity = UUID(evaluation_id)
    _alone(evaluations.lock_name(identity), lambda connection: _evaluate(connection, identity))


@app.task(name="fedssl.sweep", bind=True)  # type: ignore[untyped-decorator]
def sweep(task: Any) -> None:
    """Find what waits for nobody but us, and look at each. This is what makes losing a message harmless.

    Sweeps that have piled up behind a long task are one.
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
            waiting = jobs.take_waiting(session, depths[DISTILL])
            unjudged = judgements.take_waiting(session, depths[EVALUATE])
    except UNREACHABLE as error:
        log.warning("postgres.unreachable", error=type(error).__name__, consequence="the next sweep will look")
        return
    for run_id in runs:
        advance_run.delay(str(run_id))
    for job_id in waiting:
        distil.delay(str(job_id))
    for evaluation_id in unjudged:
        evaluate.delay(str(evaluation_id))


@app.task(name="fedssl.collect")  # type: ignore[untyped-decorator]
def collect() -> None:
    """Remove from the store what nobody needs any more."""
    try:
        collected = retention.collect()
    except UNREACHABLE as error:
        log.warning("postgres.unreachable", error=type(error).__name__, consequence="the next collection will do it")
        return
    if collected is None:
        log.info("busy", name=retention.LOCK, consequence="the next collection will do it")
    else:
        kinds, num_bytes = dict(collected.counts), collected.num_bytes.total()
        log.info("artifacts.collected", count=collected.counts.total(), bytes=num_bytes, kinds=kinds)


def _alone(name: str, work: Callable[[Connection], None]) -> None:
    """Do the work unless another process does it at this moment. The sweep sees to what is left undone."""
    try:
        with exclusive(name) as connection:
            if connection is None:
                log.info("busy", name=name, consequence="another process has it; the sweep will look again")
            else:
                work(connection)
    except UNREACHABLE as error:
        log.warning("postgres.unreachable", error=type(error).__name__, consequence="the sweep will look again")


def _advance(run_id: UUID) -> bool:
    """One step; False: there is nothing more to do now. What fails on one run is noted there and stops no other."""
    step = None
    try:
        with transaction() as session:
            step = service.next_step(session, run_id)
        if step in (Step.PREPARE, Step.AGGREGATE):
            _compute(run_id, step)
    except UNREACHABLE:
        raise
    except Exception as error:
        log.exception("run.stalled", run=str(run_id))
        TASK_FAILURES.labels("advance_run").inc()
        with transaction() as session:
            service.note_failure(session, run_id, f"{type(error).__name__}: {error}", begun=step is not None)
        return False
    return step is not Step.WAIT


# Inside the functions and not above: beat imports this module too, and must never import torch.


@worker_ready.connect  # type: ignore[untyped-decorator]
def _warm_up(sender: Any, **_: object) -> None:
    """Load what the first aggregation would load, while nothing is to be done. The other queues' first task can wait,
    and an idle process of theirs stays small."""
    if AGGREGATE in sender.app.amqp.queues.consume_from:
        import fedssl_coordinator.aggregator.rounds  # noqa: F401


def _compute(run_id: UUID, step: Step) -> None:
    from fedssl_coordinator.aggregator import rounds
    from fedssl_coordinator.aggregator.device import set_threads

    set_threads()
    if step is Step.PREPARE:
        rounds.prepare(run_id)
    else:
        rounds.aggregate(run_id)


def _distil(connection: Connection, job_id: UUID) -> None:
    from fedssl_coordinator.aggregator import distillation as compute

    def note_failure(why: str) -> None:
        log.exception("distillation.stalled", job=str(job_id))
        TASK_FAILURES.labels("distil").inc()
        with transaction() as session:
            distillation.note_failure(session, job_id, why)

    _on_device(lambda: compute.distil(connection, job_id), note_failure)


def _evaluate(connection: Connection, evaluation_id: UUID) -> None:
    from fedssl_coordinator.aggregator import evaluations as compute

    def note_failure(why: str) -> None:
        log.exception("evaluation.stalled", evaluation=str(evaluation_id))
        TASK_FAILURES.labels("evaluate").inc()
        with transaction() as session:
            evaluations.note_failure(session, evaluation_id, why)

    _on_device(lambda: compute.evaluate(connection, evaluation_id), note_failure)


def _on_device(work: Callable[[], None], note_failure: Callable[[str], None]) -> None:
    """What fails is noted; a device that fails costs this process, for it answers nothing from then on."""
    from torch import AcceleratorError

    try:
        work()
    except UNREACHABLE:
        raise
    except Exception as error:
        note_failure(f"{type(error).__name__}: {error}")
        if isinstance(error, AcceleratorError):
            raise WorkerShutdown(1) from error  # a new process can use it
