"""Trainings on the coordinator, as the API shows them."""

from datetime import datetime
from uuid import UUID

from pydantic import Field

from fedssl.protocol.base import Digest
from fedssl.protocol.states import JobState
from fedssl.protocol.views.base import View


class DistillationJobView(View):
    """A training on the coordinator, at the end of a round or before the first round."""

    id: UUID
    run_id: UUID
    round_number: int = Field(description="The round, or 0 before the first one.")
    state: JobState
    reason: str | None = Field(description="Why the job was retried, failed or was cancelled.")
    epoch: int = Field(description="Number of completed epochs.")
    num_epochs: int
    loss: float | None = Field(description="Mean loss of the last epoch.")
    seconds_per_epoch: float | None
    eta_seconds: float | None = Field(description="Estimated remaining time. Null unless the job is running.")
    checkpoint: Digest | None = Field(description="The artifact from which the job resumes if it is killed.")
    num_tries: int
    created_at: datetime
    started_at: datetime | None
    updated_at: datetime | None
    finished_at: datetime | None
