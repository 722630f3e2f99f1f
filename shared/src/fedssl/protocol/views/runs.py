"""Runs, as the API shows them."""

from datetime import datetime
from uuid import UUID

from pydantic import BaseModel, ConfigDict, Field

from fedssl.protocol.base import ClientId, Digest
from fedssl.protocol.runs import RunSpec
from fedssl.protocol.states import Outcome, RunState
from fedssl.protocol.views.base import View
from fedssl.protocol.views.distillation import DistillationJobView
from fedssl.protocol.views.rounds import RoundView


class RunCreate(BaseModel):
    """A new run. With `start`, it runs as soon as enough clients have registered."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    spec: RunSpec
    start: bool = True


class RunSummary(View):
    """One line of the list of runs."""

    id: UUID
    name: str
    method: str
    state: RunState
    outcome: Outcome | None
    reason: str | None
    rounds_closed: int
    num_rounds: int
    created_at: datetime
    started_at: datetime | None
    finished_at: datetime | None


class RunView(RunSummary):
    """A run with all details, and with its current or last round."""

    spec: RunSpec
    initial_model: Digest | None = Field(description="The weights before training. Null until they exist.")
    model: Digest | None = Field(description="The newest global weights.")
    server_state: Digest | None = Field(default=None, description="The state that the method keeps on the coordinator.")
    current_round: RoundView | None
    distillation: DistillationJobView | None = Field(
        default=None, description="The training on the coordinator that is queued or running."
    )
    clients: list[ClientId] = Field(description="The clients from which cohorts are sampled.")
    left_out: dict[ClientId, str] = Field(
        default={}, description="Those of the clients to which no round is offered, with the reason."
    )


class DimensionAssignmentView(View):
    """The embedding dimensions that are assigned to one client in a run."""

    client_id: ClientId
    dimensions: tuple[int, ...]
