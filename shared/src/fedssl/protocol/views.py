"""What the API shows."""

from datetime import datetime
from typing import Annotated, Any, Generic, Literal, TypeVar
from uuid import UUID

from pydantic import BaseModel, ConfigDict, Field

from fedssl.protocol.base import ClientId, Digest, RegisteredName
from fedssl.protocol.evaluation import JudgingConfig, MapMethod
from fedssl.protocol.ledger import PublicKey
from fedssl.protocol.model import EncoderConfig
from fedssl.protocol.policy import PolicyNotice
from fedssl.protocol.runs import RunSpec
from fedssl.protocol.states import AssignmentState, JobState, Outcome, RoundState, RunState, Verdict
from fedssl.protocol.tokens import DAY_SECONDS, LastingRole, LifetimeSeconds, Role
from fedssl.protocol.work import Progress

T = TypeVar("T")


class View(BaseModel):
    """Unknown keys are ignored here: an older client must be able to read a newer coordinator."""

    model_config = ConfigDict(frozen=True)


class Page(View, Generic[T]):
    """One page of a list. Pass `next_cursor` as `cursor` for the next; None: this was the last."""

    items: Annotated[list[T], Field(fail_fast=True)]
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
    num_wanted: int | None = Field(
        default=None, description="Of an over-sampled cohort: with how many updates it closes; None: everybody's."
    )
    opened_at: datetime
    deadline: datetime
    closed_at: datetime | None
    assignments: list[AssignmentView]


class DistillationJobView(View):
    """A training on the coordinator, at the end of a round or before the first."""

    id: UUID
    run_id: UUID
    round_number: int = Field(description="0: before the first round.")
    state: JobState
    reason: str | None = Field(description="Why it was tried again, failed or was cancelled.")
    epoch: int = Field(description="Epochs that are done.")
    num_epochs: int
    loss: float | None = Field(description="The last epoch's mean.")
    seconds_per_epoch: float | None
    eta_seconds: float | None = Field(description="What is left at this pace; None unless it runs.")
    checkpoint: Digest | None = Field(description="The artifact that a killed job goes on from.")
    num_tries: int
    created_at: datetime
    started_at: datetime | None
    updated_at: datetime | None
    finished_at: datetime | None


Results = dict[str, float | None]
"""Numbers by name; None: not a number, for an encoder whose training diverged."""


class EvaluationCreate(BaseModel):
    """Asks for the encoder of a round to be judged."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    config: JudgingConfig
    round_number: int | None = Field(
        default=None, ge=0, le=100_000, description="After which round; 0: before training; None: the newest."
    )


class EvaluationProgress(View):
    """Where a judgement stands; `share`, 0..1, is of what is being done, None where that is not known."""

    doing: str | None = None
    share: float | None = None
    results: Results = Field(default={}, description="Of the measures that are done, from which a killed one goes on.")


class EvaluationView(View):
    """One judgement of a round's encoder on a labelled data set."""

    id: UUID
    run_id: UUID
    round_number: int = Field(description="0: before training.")
    model: Digest
    dataset: RegisteredName
    dataset_digest: Digest
    config: JudgingConfig
    state: JobState
    reason: str | None = Field(description="Why it was tried again, failed or was cancelled.")
    progress: EvaluationProgress | None
    results: Results | None = Field(description="None until it is completed.")
    num_tries: int
    created_at: datetime
    started_at: datetime | None
    finished_at: datetime | None


class EmbeddingMapView(View):
    """The test images of an evaluation as points, the same images for every round."""

    evaluation_id: UUID
    run_id: UUID
    round_number: int = Field(description="0: before training.")
    dataset: RegisteredName
    method: MapMethod
    labels: list[int] = Field(description="The class of every point, by number.")
    class_names: list[str] = Field(description="By number; empty where the data set has none, or too many.")
    points: list[tuple[float, float]] = Field(
        description="Around 0, at a root mean square distance of 1, turned onto the round that was mapped before."
    )


class RunView(RunSummary):
    """A run in full, with the round in progress (or the last one)."""

    spec: RunSpec
    initial_model: Digest | None = Field(description="The weights before training; None until they are made.")
    model: Digest | None = Field(description="The newest global weights.")
    server_state: Digest | None = Field(default=None, description="What the method keeps on the coordinator.")
    current_round: RoundView | None
    distillation: DistillationJobView | None = Field(
        default=None, description="The training on the coordinator that waits or runs."
    )
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
    encoder: EncoderConfig | None = Field(default=None, description="What the worker declared; None: nothing.")
    policy: PolicyNotice | None = Field(default=None, description="What its owner's policy lets out; None: no policy.")


class LedgerAnchorView(View):
    """How far a client's ledger went; `is_consistent` false: it contradicted an earlier anchor."""

    key: PublicKey
    seq: int
    head: Digest
    is_consistent: bool
    at: datetime


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


class PublicDatasetCreate(BaseModel):
    """Gives a name to public images whose file has been uploaded as an artifact."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: RegisteredName
    digest: Digest
    split: Literal["train", "test"] = Field(
        default="train", description="Which split of its source it is; a run's public_data must ask for the same."
    )


class PublicDatasetView(View):
    """Public images that runs may name, as workers fetch them."""

    name: RegisteredName
    digest: Digest
    split: Literal["train", "test"]
    num_images: int
    channels: Literal[1, 3]
    image_size: int
    created_at: datetime


class EvaluationDatasetCreate(BaseModel):
    """Gives a name to labelled images whose file has been uploaded as an artifact."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: RegisteredName
    digest: Digest


class EvaluationDatasetView(View):
    """Labelled images that encoders are judged on. Workers cannot fetch them."""

    name: RegisteredName
    digest: Digest
    num_train: int
    num_test: int
    num_classes: int
    channels: Literal[1, 3]
    image_size: int
    created_at: datetime


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

    role: LastingRole
    client_id: ClientId | None = None
    label: str = Field(default="", max_length=100)
    lifetime_seconds: LifetimeSeconds | None = Field(default=None, description="None: until it is revoked.")


class EnrolmentCreate(BaseModel):
    """A token that makes somebody the client's worker, once."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    client_id: ClientId
    label: str = Field(default="", max_length=100)
    lifetime_seconds: LifetimeSeconds = DAY_SECONDS


class TokenView(View):
    """A token without its secret, which is shown once, at creation."""

    id: UUID
    role: Role
    client_id: ClientId | None
    label: str
    created_at: datetime
    expires_at: datetime | None = None
    used_at: datetime | None = Field(default=None, description="When an enrolment became a worker's token.")
    revoked_at: datetime | None


class TokenCreated(TokenView):
    """The only answer that carries the secret."""

    secret: str = Field(repr=False)


class Health(View):
    """`ok`, or what does not answer."""

    status: Literal["ok", "unavailable"]
    checks: dict[str, str] = {}


class UploadPart(View):
    """Bytes of an upload: `num_bytes` from `offset` on are to be PUT to `url`."""

    offset: int = Field(ge=0)
    num_bytes: int = Field(ge=1)
    url: str = Field(max_length=8192)


class UploadParts(View):
    """What is missing of an upload, or the first of it; nothing: it has arrived, was checked and is stored."""

    parts: tuple[UploadPart, ...]
