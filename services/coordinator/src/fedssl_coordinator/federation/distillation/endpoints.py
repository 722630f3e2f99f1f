"""`/v1/distillation-jobs`, and a run's own list."""

from datetime import datetime
from uuid import UUID

from fastapi import APIRouter

from fedssl.protocol.views import DistillationJobView, Page
from fedssl_coordinator.core.db import DB
from fedssl_coordinator.core.paging import Cursor, Limit, decode_cursor, page_of
from fedssl_coordinator.federation.distillation import service
from fedssl_coordinator.federation.runs import service as runs
from fedssl_coordinator.identity.authentication import Operator, Viewer

router = APIRouter(tags=["distillation"])


@router.get("/v1/runs/{run_id}/distillation-jobs")
def list_distillation_jobs(
    run_id: UUID, caller: Viewer, session: DB, limit: Limit = 100, cursor: Cursor = None
) -> Page[DistillationJobView]:
    """What the coordinator itself has trained in a run, oldest first; empty for methods that only combine updates."""
    runs.require(session, run_id)
    after = decode_cursor(cursor, datetime.fromisoformat, UUID) if cursor else None
    rows = service.of_run(session, run_id, limit + 1, after)
    return page_of(rows, limit, service.view, lambda row: (row.created_at.isoformat(), str(row.id)))


@router.get("/v1/distillation-jobs/{job_id}")
def show_distillation_job(job_id: UUID, caller: Viewer, session: DB) -> DistillationJobView:
    """One job: how far it is, at what loss, and how long it will take."""
    return service.show(session, job_id)


@router.post("/v1/distillation-jobs/{job_id}/cancel")
def cancel_distillation_job(job_id: UUID, caller: Operator, session: DB) -> DistillationJobView:
    """Call a job off at its next epoch and pause its run. Resumed, the run begins the same distillation anew."""
    return service.cancel(session, job_id)
