"""Projects, as the API shows them."""

from datetime import datetime

from pydantic import BaseModel, ConfigDict

from fedssl.protocol.projects import ProjectName
from fedssl.protocol.views.base import View


class ProjectCreate(BaseModel):
    """A request for a new project."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: ProjectName


class ProjectView(View):
    """A project: runs, clients and data sets belong to one, and tokens may be restricted to one."""

    name: ProjectName
    created_at: datetime
