"""What the API shows."""

from datetime import datetime
from typing import Any, Generic, Literal, TypeVar
from uuid import UUID

from pydantic import BaseModel, ConfigDict, Field

from fedssl.protocol.base import ClientId, Digest
from fedssl.protocol.runs import RunSpec
from fedssl.protocol.states import AssignmentState, Outcome, RoundState, RunState, Verdict
from fedssl.protocol.work import Progress

T = TypeVar("T")


class View(BaseModel):
    """Unknown keys are ignored here: an older client must be able to read a newer coordinator."""

    model_config = ConfigDict(frozen=True)


class Page(View, Generic[T]):
    """One page of a list. Pass `next_cursor` as `cursor` for the next; None: this was the last."""

    items: list[T]
    next_cursor: str | None = None


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


class AssignmentView(View):
    """One client in one round."""

    id: UUID
    client_id: ClientId
    attempt: int
    state: AssignmentState
    reason: str | None
    num_examples: int | None
    update: Digest | None
    progress: Progress | None
    offered_at: datetime
    leased_at: datetime | None
    closed_at: datetime | None
    lease_expires_at: datetime | None


class RoundView(View):
    """One round: its cohort, and how it ended."""

    number: int
    attempt: int
    state: RoundState
    verdict: Verdict | None
    reason: str | None
    broadcast: Digest
    opened_at: datetime
    deadline: datetime
    closed_at: datetime | None
    assignments: list[AssignmentView]


class RunView(RunSummary):
    """A run in full, with the round in progress (or the last one)."""

    spec: RunSpec
    initial_model: Digest | None = Field(description="The weights before training; None until they are made.")
    model: Digest | None = Field(description="The newest global weights.")
    current_round: RoundView | None
    clients: list[ClientId] = Field(description="The clients that the run can draw on.")


class ClientView(View):
    """A data owner, as the coordinator knows it."""

    id: ClientId
    registered_at: datetime | None
    last_seen_at: datetime | None
    revoked_at: datetime | None
    device: str | None
    num_images: int | None
    channels: int | None
    image_size: int | None
    worker_version: str | None


class EventView(View):
    """One line of the audit log."""

    id: int
    at: datetime
    kind: str
    run_id: UUID | None
    round_number: int | None
    client_id: ClientId | None
    message: str
    data: dict[str, Any] = {}


class MetricView(View):
    """One number; `client_id` None: of the whole round."""

    round_number: int
    client_id: ClientId | None
    name: str
    value: float


class DimensionAssignmentView(View):
    """The embedding's dimensions that are one client's own in a run."""

    client_id: ClientId
    dimensions: tuple[int, ...]


class MethodView(View):
    """A method: where it comes from, what leaves a client, and its parameters as JSON schema."""

    name: str
    title: str
    version: int
    paper: str
    equations: str
    leaves_the_client: str
    stays_on_the_client: str
    description: str
    config_schema: dict[str, Any]


class TokenCreate(BaseModel):
    """A new token; `client_id` exactly for workers."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    role: Literal["operator", "worker"]
    client_id: ClientId | None = None
    label: str = Field(default="", max_length=100)


class TokenView(View):
    """A token without its secret, which is shown once, at creation."""

    id: UUID
    role: Literal["operator", "worker"]
    client_id: ClientId | None
    label: str
    created_at: datetime
    revoked_at: datetime | None


class TokenCreated(TokenView):
    """The only answer that carries the secret."""

    secret: str


class Health(View):
    """`ok`, or what does not answer."""

    status: Literal["ok", "unavailable"]
    checks: dict[str, str] = {}
