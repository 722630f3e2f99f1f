"""The messages between a worker and the coordinator."""

from typing import Annotated, Literal
from uuid import UUID

from pydantic import AwareDatetime, Field, field_validator, model_validator

from fedssl.protocol.base import PROTOCOL_VERSION, ClientId, Digest, StrictModel
from fedssl.protocol.data import Channels, ServedShapes
from fedssl.protocol.ledger import AnchorReceipt, LedgerAnchor
from fedssl.protocol.model import EncoderConfig
from fedssl.protocol.plan import ArtifactPlan
from fedssl.protocol.policy import PolicyNotice
from fedssl.protocol.runs import RunSpec
from fedssl.protocol.secure_work import MOST_NEIGHBOURS, SecureMember
from fedssl.protocol.states import AssignmentState, Cause

MetricName = Annotated[str, Field(pattern=r"^[a-z0-9_]+(?:/[a-z0-9_]+)*$", max_length=64)]
MetricValue = Annotated[float, Field(strict=True, ge=-1e30, le=1e30)]
"""The bounds are far beyond any loss, and small enough that the mean of several values cannot overflow."""

Metrics = Annotated[dict[MetricName, MetricValue], Field(max_length=64)]
SHORT_TEXT_CHARACTERS = 500
ShortText = Annotated[str, Field(max_length=SHORT_TEXT_CHARACTERS)]
Count = Annotated[int, Field(strict=True, ge=0, le=10**12)]
MemoryBytes = Annotated[int, Field(strict=True, ge=0, le=2**50)]
NumImages = Annotated[int, Field(strict=True, ge=1, le=10**9)]
"""A client's number of images. No client has more, and one that claims more would outweigh all others."""

Anchor = Annotated[
    LedgerAnchor | None, Field(description="The head of the worker's ledger. Null: nothing new to anchor.")
]
Receipt = Annotated[
    AnchorReceipt | None,
    Field(
        description="The receipt for the request's anchor. Null if there was none, or if it contradicts an earlier one."
    ),
]


RoundNumber = Annotated[int, Field(ge=1, le=100_000)]
"""A run has at most 100,000 rounds."""

TotalBits = Annotated[int, Field(ge=0, le=26)]

LeaseSeconds = Annotated[float, Field(ge=0.1, le=86_400)]
"""A spec may have leases of 2 s to a day."""


class Enrol(StrictModel):
    """A worker's first request, with an enrolment token: the hash of the token that it generated for itself."""

    token_hash: Digest = Field(
        description="sha256 of the new token. The token leaves the worker only to authenticate it."
    )


class Enrolled(StrictModel):
    """The worker's own token is now valid. A repeated request with the same hash gets the same answer."""

    client_id: ClientId
    token_id: UUID


class CheckNumbers(StrictModel):
    """Numbers that `fedssl-worker check` has measured at a site. Null: not measured, or not to be reported."""

    method: Annotated[str, Field(max_length=64)] | None = Field(
        default=None, description="The method of the run that was tried. Null: none."
    )
    problems: Count | None = Field(default=None, description="Number of checks that found a problem.")
    update_bytes: Count | None = Field(default=None, description="Size of what one round sends.")
    broadcast_bytes: Count | None = Field(default=None, description="Size of what one round receives.")
    seconds_per_round: Annotated[float, Field(ge=0, le=1e9)] | None = Field(
        default=None, description="Expected training time of one round, without transfers."
    )


class Register(StrictModel):
    """A worker's registration, sent when it starts."""

    protocol_version: int = PROTOCOL_VERSION
    worker_version: Annotated[str, Field(max_length=64)]
    methods: Annotated[dict[Annotated[str, Field(max_length=64)], Count], Field(max_length=256)] = Field(
        description="Name and version of each method that this worker supports."
    )
    device: ShortText = Field(description="For people: `cpu, 2 threads` or the GPU's name.")
    num_images: NumImages | None = Field(
        description="Null only if the policy lets updates leave in secure rounds and nothing else: then no one but the "
        "client needs the number."
    )
    channels: Channels
    image_size: int = Field(ge=8, le=512)
    serves: ServedShapes | None = Field(
        default=None,
        exclude_if=lambda it: it is None,
        description="The shapes in which this worker can prepare its images for a run. Null: only `channels` and "
        "`image_size`, as workers did before they could prepare others.",
    )
    encoder: EncoderConfig | None = Field(
        default=None,
        description="The encoder that this client can train, for runs whose clients may differ (FLESD). Null: the "
        "encoder of the run's spec.",
    )
    policy: PolicyNotice | None = Field(
        default=None, description="What the data owner's policy allows to be sent. Null if there is no policy."
    )
    identity: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")] | None = Field(
        default=None,
        exclude_if=lambda it: it is None,
        description="The worker's Ed25519 public key, by which other workers know it in secure rounds.",
    )
    check: CheckNumbers | None = Field(
        default=None,
        exclude_if=lambda it: it is None,
        description="What `fedssl-worker check --report` has measured, as far as the data owner's policy allows it.",
    )
    anchor: Anchor = None

    @model_validator(mode="after")
    def _num_images_may_be_kept(self) -> "Register":
        if self.num_images is None and (self.policy is None or not self.policy.keeps_num_images):
            raise ValueError(
                'num_images is null, and the policy also has rules without secure = "required": send the number'
            )
        return self

    @field_validator("policy")
    @classmethod
    def _policy_is_quickly_read(cls, policy: PolicyNotice | None) -> PolicyNotice | None:
        # Here and not in the notice: coordinators keep notices that were sent before there was a bound.
        if policy is not None and (why := policy.too_long) is not None:
            raise ValueError(why)
        return policy


class Registered(StrictModel):
    """The coordinator's answer to `Register`."""

    client_id: ClientId
    protocol_version: Count = PROTOCOL_VERSION
    receipt: Receipt = None


class AcceptedUpdate(StrictModel):
    """The newest update of this client that a run accepted. The client must promote its state to it."""

    round_number: RoundNumber
    update: Digest


class WorkItem(StrictModel):
    """A leased assignment with everything that is needed to train it."""

    assignment_id: UUID
    run_id: UUID
    round_number: RoundNumber
    client_id: ClientId
    spec: RunSpec
    method_version: Count
    plan: ArtifactPlan
    broadcast: Digest
    frozen: Digest | None = Field(
        default=None,
        exclude_if=lambda it: it is None,
        description="The plan's frozen tensors, which are the same in every round. Null: there are none.",
    )
    last_accepted: AcceptedUpdate | None = Field(
        description="Null if the run has not accepted an update of this client yet: any stored state is then invalid."
    )
    dimensions: tuple[Annotated[int, Field(ge=0, lt=2**31)], ...] | None = Field(
        default=None, max_length=2**16, description="The embedding dimensions that are assigned to this client (SSD)."
    )
    secure_cohort: Annotated[tuple[SecureMember, ...], Field(max_length=MOST_NEIGHBOURS)] | None = Field(
        default=None,
        exclude_if=lambda it: it is None,
        description="All clients of a secure round, with their identity keys. Null: the run has no secure aggregation.",
    )
    secure_protocol: Count | None = Field(
        default=None,
        exclude_if=lambda it: it is None,
        description="The version of secure aggregation that the coordinator speaks, if the round has it. Version 1 had "
        "no key.",
    )
    total_bits: tuple[TotalBits, TotalBits] | None = Field(
        default=None,
        exclude_if=lambda it: it is None,
        description="In a secure round with 32-bit words: the bits of the largest total weight, and of the largest "
        "number of clients. Null: all words have 64 bits.",
    )
    lease_seconds: LeaseSeconds
    round_deadline: AwareDatetime


class Claim(StrictModel):
    """A request for an assignment. The coordinator waits up to `wait_seconds` for one."""

    wait_seconds: float = Field(default=25, ge=0, le=60)
    site_evaluations: bool = Field(
        default=False,
        exclude_if=lambda it: not it,
        description="Also stop waiting if there is an evaluation for this site. Sent only to coordinators whose answer "
        "to a claim had the header `Fedssl-Site-Evaluations`.",
    )


class Progress(StrictModel):
    """The progress of a client's local training."""

    phase: Literal["downloading", "training", "uploading"]
    epoch: Count
    num_epochs: Count
    step: Count
    num_steps: Count
    loss: float | None = None
    images_per_second: float | None = Field(default=None, ge=0)


class Resources(StrictModel):
    """The memory and GPU time that a worker's process uses. Null: unknown, or not to be reported."""

    memory_bytes: MemoryBytes | None = Field(default=None, description="Resident memory.")
    gpu_memory_bytes: MemoryBytes | None = Field(
        default=None, description="Memory that is reserved on all GPUs. Null if it uses none."
    )
    gpu_utilisation: float | None = Field(
        default=None,
        ge=0,
        le=1,
        exclude_if=lambda it: it is None,
        description="Share of the last second in which these GPUs computed, for any process; their mean.",
    )


class StateLost(StrictModel):
    """The client state that was stored with the newest accepted update cannot be used any more."""

    round_number: int = Field(ge=1, le=100_000, description="The round of that update.")
    reason: Literal["missing", "damaged"]


class Heartbeat(StrictModel):
    """Renews the lease of an assignment, or only reports that the worker is alive."""

    assignment_id: UUID | None = None
    progress: Progress | None = None
    anchor: Anchor = None
    resources: Resources | None = Field(
        default=None,
        exclude_if=lambda it: it is None,
        description="Sent only if the answer to the claim had the header `Fedssl-Resources`.",
    )
    state_lost: StateLost | None = Field(
        default=None,
        exclude_if=lambda it: it is None,
        description="Sent before the training if the client's state is lost. The reply decides whether it may train.",
    )


class HeartbeatReply(StrictModel):
    """If `carry_on` is false, the worker must stop working on the assignment, for `reason`."""

    carry_on: bool = True
    reason: Annotated[str, Field(max_length=10_000)] = ""
    receipt: Receipt = None


class Submit(StrictModel):
    """Submits an update whose bytes are already uploaded."""

    assignment_id: UUID
    update: Digest
    num_examples: Annotated[int, Field(strict=True)] = Field(
        ge=1,
        le=10**12,
        description="Images trained on: the update's weight in the mean. At most the `num_images` of the registration.",
    )
    metrics: Metrics = {}
    anchor: Anchor = None


DELIVERY_HEADER = "Fedssl-Submission"
"""The header of a delivery: a `Submit` as JSON. The body is the update."""

OFFER_HEADER = "Fedssl-Deliver-Bytes"
"""The header of a claim's answer: the size in bytes up to which the coordinator takes an update and its submission in
one request. Older coordinators do not send it."""

RESOURCES_HEADER = "Fedssl-Resources"
"""The header of a claim's answer, with any value: the coordinator reads `resources` in heartbeats. Older ones do not
send it, and refuse such heartbeats."""

BROADCAST_HEADER = "Fedssl-Wants-Broadcast"
"""A header of `submit` and `deliver`. Its sender understands receipts with the broadcast of the round."""

PAUSE_HEADER = "Fedssl-Obeys-Retry-After"
"""The header of a claim, with the value 1: the worker waits for the seconds of a `Retry-After` before its next claim.
Only such claims get one. Older coordinators ignore it."""

LONGEST_PAUSE_SECONDS = 60
"""The longest `Retry-After` of a claim's answer: a worker that is alive is seen at least this often."""

DELIVERY_BYTES = 4 << 20
DELIVERY_CHARACTERS = 8000
"""The limit of `DELIVERY_HEADER`: the longest `Submit` has fewer than 7,000. Many proxies refuse longer headers."""


class Submitted(StrictModel):
    """The result of a submission. The same submission again, with the same numbers, gets the same answer."""

    assignment_id: UUID
    state: AssignmentState
    receipt: Receipt = None


MOST_RUNS = 500


class EndedQuery(StrictModel):
    """Asks which runs have ended, of those for which a worker stores a client state."""

    run_ids: Annotated[tuple[UUID, ...], Field(max_length=MOST_RUNS, fail_fast=True)]


class EndedRuns(StrictModel):
    """The ended runs whose client states are no longer needed. Excludes runs whose only result is the client state."""

    run_ids: Annotated[tuple[UUID, ...], Field(max_length=MOST_RUNS, fail_fast=True)]


class Decline(StrictModel):
    """Gives an assignment back, with the reason."""

    assignment_id: UUID
    reason: ShortText
    cause: Cause | None = Field(
        default=None,
        exclude_if=lambda it: it is None,
        description="Whose problem it is. The coordinator checks `coordinator` itself. Null from older workers.",
    )
