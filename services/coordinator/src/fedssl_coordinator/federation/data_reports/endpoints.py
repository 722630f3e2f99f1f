"""`/v1/work/data-report` and `/v1/data-card`"""

from typing import Annotated

from fastapi import APIRouter, Query

from fedssl.protocol.data_card import DataReport, DataReported
from fedssl.protocol.projects import ProjectName
from fedssl.protocol.views import FederationCardView
from fedssl_coordinator.core.db import DB
from fedssl_coordinator.core.openapi import problems
from fedssl_coordinator.federation.data_reports import service
from fedssl_coordinator.identity.authentication import Viewer, WorkerId
from fedssl_coordinator.identity.projects import service as projects

router = APIRouter()

Project = Annotated[ProjectName | None, Query(description="The sites' project. Null: the caller's, or else `default`.")]


@router.post("/v1/work/data-report", tags=["work"])
def report_data(request: DataReport, client_id: WorkerId, session: DB) -> DataReported:
    """Store what the data owner discloses about its images, in place of the last report."""
    service.receive(session, client_id, request)
    return DataReported()


@router.get("/v1/data-card", tags=["clients"], responses=problems(404))
def show_data_card(caller: Viewer, session: DB, project: Project = None) -> FederationCardView:
    """Show the data cards of the sites, their drift, and the federation's mean and deviation per channel."""
    return service.show(session, projects.chosen(session, project))
