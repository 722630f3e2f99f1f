"""Runs, as the API shows them."""

from datetime import datetime
from typing import Annotated
from uuid import UUID

from pydantic import BaseModel, ConfigDict, Field, field_validator

from fedssl.protocol.base import ClientId, Digest
from fedssl.protocol.projects import DEFAULT_PROJECT, ProjectName, WantedProject
from fedssl.protocol.runs import RunName, RunSpec
from fedssl.protocol.states import Outcome, RunState
from fedssl.protocol.validation import explained
from fedssl.protocol.views.base import View
from fedssl.protocol.views.distillation import DistillationJobView
from fedssl.protocol.views.rounds import RoundView

Tag = Annotated[
    str,
    explained(
        r"^[a-z0-9][a-z0-9._-]{0,31}$",
        "a tag has at most 32 lower-case letters from a to z, digits, and the characters . _ -, and begins with a "
        "letter or a digit",
    ),
]


class RunCreate(BaseModel):
    """A new run. With `start`, it runs as soon as enough clients have registered."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    spec: RunSpec
    start: bool = True
    project: WantedProject = Field(
        default=None,
        description="The project of the run, whose clients may take part. Null: that of the token, or else `default`.",
    )


class RunContinue(BaseModel):
    """A request to train a completed run further. Repeating it changes nothing."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    num_rounds: int = Field(
        ge=1, le=100_000, description="The number of rounds in total, including those that the run has closed."
    )


class RunEdit(BaseModel):
    """A new name, tags or notes of a run. What is null stays as it is."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: RunName | None = Field(default=None, description="The displayed name. The spec keeps its own.")
    tags: Annotated[tuple[Tag, ...], Field(max_length=20)] | None = Field(
        default=None, description="All tags of the run; they replace the earlier ones."
    )
    notes: Annotated[str, Field(max_length=10_000)] | None = None

    @field_validator("tags")
    @classmethod
    def _each_once(cls, tags: tuple[str, ...] | None) -> tuple[str, ...] | None:
        return None if tags is None else tuple(sorted(set(tags)))


class RunSummary(View):
    """One line of the list of runs."""

    id: UUID
    project: ProjectName = DEFAULT_PROJECT
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
    tags: list[str] = Field(default=[], description="Tags by which operators find the run.")


class RunView(RunSummary):
    """A run with all details, and with its current or last round."""

    spec: RunSpec
    notes: str = Field(default="", description="What operators have written about the run.")
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
