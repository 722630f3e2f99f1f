"""Evaluations of encoders, as the API shows them."""

from datetime import datetime
from typing import Annotated
from uuid import UUID

from pydantic import BaseModel, ConfigDict, Field

from fedssl.protocol.base import Digest, RegisteredName
from fedssl.protocol.chance import Chance
from fedssl.protocol.evaluation import JudgingConfig, MapMethod
from fedssl.protocol.states import JobState
from fedssl.protocol.views.base import View

Results = dict[str, float | None]
"""Numbers by name. None stands for NaN: the training of the encoder diverged."""


class EvaluationCreate(BaseModel):
    """A request to evaluate the encoder of a round."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    config: JudgingConfig
    round_number: int | None = Field(
        default=None, ge=0, le=100_000, description="The round; 0 is the model before training, null the newest round."
    )


class EvaluationProgress(View):
    """The progress of an evaluation. `share`, from 0 to 1, is the finished part of `doing`; null if unknown."""

    doing: str | None = None
    share: float | None = None
    results: Results = Field(
        default={}, description="Results of the completed measures. An evaluation that was killed resumes after them."
    )


class EvaluationView(View):
    """One evaluation of a round's encoder on a labelled data set."""

    id: UUID
    run_id: UUID
    round_number: int = Field(description="The round, or 0 before training.")
    model: Digest
    dataset: RegisteredName
    dataset_digest: Digest
    config: JudgingConfig
    state: JobState
    reason: str | None = Field(description="Why the job was retried, failed or was cancelled.")
    progress: EvaluationProgress | None
    results: Results | None = Field(description="Null until the evaluation is completed.")
    chance: Chance | None = Field(
        default=None,
        description="The accuracy of always answering the largest class of the test images. Null until the evaluation "
        "is completed, and for evaluations by an older coordinator.",
    )
    num_tries: int
    created_at: datetime
    started_at: datetime | None
    finished_at: datetime | None


class EmbeddingMapView(View):
    """The test images of an evaluation as points; the images are the same for every round."""

    evaluation_id: UUID
    run_id: UUID
    round_number: int = Field(description="The round, or 0 before training.")
    dataset: RegisteredName
    method: MapMethod
    labels: list[int] = Field(description="The class number of each point.")
    class_names: list[str] = Field(description="Class names by number. Empty if the data set has none, or too many.")
    points: list[Annotated[list[float], Field(min_length=2, max_length=2)]] = Field(
        description="Centred on 0 with a root mean square distance of 1, and rotated to match the round mapped before."
    )
