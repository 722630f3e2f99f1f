"""`/v1/distillation-jobs`, and the list of a run's jobs."""

from datetime import datetime
from uuid import UUID

from fastapi import APIRouter

from fedssl.protocol.views import DistillationJobView, Page
from fedssl_coordinator.core.db import DB
from fedssl_coordinator.core.openapi import problems
from fedssl_coordinator.core.paging import Cursor, Limit, decode_cursor, page_of
from fedssl_coordinator.federation import run_rows
from fedssl_coordinator.federation.distillation import repository, service
from fedssl_coordinator.identity.authentication import Operator, Viewer

router = APIRouter(tags=["distillation"])


@router.get("/v1/runs/{run_id}/distillation-jobs")
def list_distillation_jobs(
    run_id: UUID, caller: Viewer, session: DB, limit: Limit = 100, cursor: Cursor = None
) -> Page[DistillationJobView]:
    """List a run's trainings on the coordinator, oldest first. Empty for methods that only combine updates."""
    run_rows.require(session, run_id)
    after = decode_cursor(cursor, datetime.fromisoformat, UUID) if cursor else None
    rows = repository.oldest_first(session, run_id, limit + 1, after)
    return page_of(rows, limit, service.view, lambda row: (row.created_at.isoformat(), str(row.id)))


@router.get("/v1/distillation-jobs/{job_id}")
def show_distillation_job(job_id: UUID, caller: Viewer, session: DB) -> DistillationJobView:
    """Show one job: its epoch, its loss, and the time that is left."""
    return service.show(session, job_id)


@router.post("/v1/distillation-jobs/{job_id}/cancel", responses=problems(409))
def cancel_distillation_job(job_id: UUID, caller: Operator, session: DB) -> DistillationJobView:
    """Cancel a job at its next epoch and pause its run. When the run is resumed, it starts the distillation again."""
    return service.cancel(session, job_id)
