"""Celery tasks. They take ids, re-read everything, and may run twice or not at all without harm."""

from uuid import UUID

import structlog

from fedssl_coordinator.celery_app import app
from fedssl_coordinator.db import run_lock, transaction
from fedssl_coordinator.rounds import repository, service
from fedssl_coordinator.rounds.service import Step
from fedssl_coordinator.settings import settings

log = structlog.get_logger(__name__)


@app.task(name="fedssl.advance_run")  # type: ignore[untyped-decorator]
def advance_run(run_id: str) -> None:
    """Move one run as far as it goes: prepare it, open a round, aggregate, close, open the next."""
    # Here and not above: beat and the API process import this module's names but must never import torch.
    from fedssl_coordinator.rounds import compute

    compute.set_threads(settings().aggregator_threads)
    identity = UUID(run_id)
    with run_lock(identity) as got:
        while got:
            with transaction() as session:
                step = service.next_step(session, identity)
            if step is Step.WAIT:
                return
            if step is Step.PREPARE:
                compute.prepare(identity)
            elif step is Step.AGGREGATE:
                compute.aggregate(identity)
    log.info("run.busy", run_id=run_id, consequence="another aggregator holds it; the sweep will look again")


@app.task(name="fedssl.sweep")  # type: ignore[untyped-decorator]
def sweep() -> None:
    """Find runs that wait for nobody but us, and look at each. This is what makes losing a message harmless."""
    with transaction() as session:
        found = repository.needing_attention(session)
    for run_id in found:
        advance_run.delay(str(run_id))
