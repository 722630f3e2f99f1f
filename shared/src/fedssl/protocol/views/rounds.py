"""Rounds and their assignments, as the API shows them."""

from datetime import datetime
from uuid import UUID

from pydantic import Field

from fedssl.protocol.base import ClientId, Digest
from fedssl.protocol.secure_aggregation import NOT_PROMISED
from fedssl.protocol.secure_work import SecurePhase
from fedssl.protocol.states import AssignmentState, Cause, RoundState, Verdict
from fedssl.protocol.views.base import View
from fedssl.protocol.work import Progress


class AssignmentView(View):
    """One client in one round."""

    id: UUID
    client_id: ClientId
    attempt: int
    state: AssignmentState
    reason: str | None
    cause: Cause | None = Field(
        default=None, description="Whose problem it was, if the worker declined and gave a cause."
    )
    num_examples: int | None
    update: Digest | None
    progress: Progress | None
    memory_bytes: int | None = Field(
        default=None, description="Resident memory of the worker's process at its last heartbeat. Null: not reported."
    )
    gpu_memory_bytes: int | None = Field(
        default=None, description="GPU memory that this process had reserved. Null: none, or not reported."
    )
    gpu_utilisation: float | None = Field(
        default=None,
        description="Share of a second, 0 to 1, in which its GPUs computed at that heartbeat. Null: not reported.",
    )
    offered_at: datetime
    leased_at: datetime | None
    closed_at: datetime | None
    lease_expires_at: datetime | None


class SecureRoundView(View):
    """The protocol of a round with secure aggregation: who takes part, and whose secrets were revealed."""

    phase: SecurePhase
    cohort: list[ClientId]
    awaited: list[ClientId] = Field(description="Clients whose message of this phase has not arrived.")
    lost: list[ClientId] = Field(description="Clients whose update is not in the sum.")
    min_survivors: int = Field(description="The smallest number of updates in the sum.")
    threshold: int = Field(description="How many shares recover a secret.")
    roster: Digest | None = Field(description="Digest of all keys of the round, once it is closed.")
    own_masks: list[ClientId] = Field(
        description="Survivors for whom shares of their own mask were revealed. Their pair masks stay secret."
    )
    mask_keys: list[ClientId] = Field(
        description="Lost clients for whom shares of their mask key were revealed. Their own masks stay secret."
    )
    not_promised: str = NOT_PROMISED


class RoundView(View):
    """One round: its cohort, and how it ended."""

    number: int
    attempt: int
    state: RoundState
    verdict: Verdict | None
    reason: str | None
    broadcast: Digest
    num_wanted: int | None = Field(
        default=None,
        description="How many updates close the round, if its cohort is over-sampled. Null: those of all clients.",
    )
    opened_at: datetime
    deadline: datetime
    closed_at: datetime | None
    counts: dict[AssignmentState, int] = Field(
        default={}, description="The number of the round's clients per state of their newest assignment."
    )
    secure: SecureRoundView | None = Field(
        default=None, description="The protocol of the round if the run has secure aggregation."
    )
    assignments: list[AssignmentView] = Field(
        description="Every assignment, by client and attempt. Empty if the request had `assignments=false`; "
        "`/v1/runs/{run_id}/rounds/{number}/assignments` lists them in pages."
    )
