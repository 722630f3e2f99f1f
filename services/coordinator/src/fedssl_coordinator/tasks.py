"""Celery tasks. They take ids, re-read everything, and may run twice or not at all without harm."""

from uuid import UUID

import structlog

from fedssl_coordinator.celery_app import app
from fedssl_coordinator.db import UNREACHABLE, run_lock, transaction
from fedssl_coordinator.rounds import repository, service
from fedssl_coordinator.rounds.service import Step
from fedssl_coordinator.settings import settings

log = structlog.get_logger(__name__)


@app.task(name="fedssl.advance_run")  # type: ignore[untyped-decorator]
def advance_run(run_id: str) -> None:
    """Move one run as far as it goes: prepare it, open a round, aggregate, close, open the next."""
    try:
        with run_lock(run_id) as got:
            if not got:
                log.info(
                    "run.busy", run_id=run_id, consequence="another aggregator holds it; the sweep will look again"
                )
            while got and _advance(UUID(run_id)):
                pass
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
        log.exception("run.stalled", run_id=str(run_id))
        with transaction() as session:
            service.note_failure(session, run_id, f"{type(error).__name__}: {error}", begun=step is not None)
        return False
    return step is not Step.WAIT


def _compute(run_id: UUID, step: Step) -> None:
    # Here and not above: beat and the API process import this module's names but must never import torch.
    from fedssl_coordinator.rounds import compute

    compute.set_threads(settings().aggregator_threads)
    if step is Step.PREPARE:
        compute.prepare(run_id)
    else:
        compute.aggregate(run_id)


@app.task(name="fedssl.sweep")  # type: ignore[untyped-decorator]
def sweep() -> None:
    """Find runs that wait for nobody but us, and look at each. This is what makes losing a message harmless."""
    try:
        with transaction() as session:
            found = repository.needing_attention(session)
    except UNREACHABLE as error:
        log.warning("postgres.unreachable", error=type(error).__name__, consequence="the next sweep will look")
        return
    for run_id in found:
        advance_run.delay(str(run_id))
