"""Registered data sets, as the API shows them."""

from datetime import datetime
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from fedssl.protocol.base import Digest, RegisteredName
from fedssl.protocol.projects import DEFAULT_PROJECT, ProjectName, WantedProject
from fedssl.protocol.views.base import View


class PublicDatasetCreate(BaseModel):
    """A request to name public images whose file has been uploaded as an artifact."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: RegisteredName
    digest: Digest
    split: Literal["train", "test"] = Field(
        default="train",
        description="The split of the source that these images are. A run's public_data must name the same split.",
    )
    project: WantedProject = Field(
        default=None, description="The project whose runs may use them. Null: that of the token, or else `default`."
    )


class PublicDatasetView(View):
    """Public images that runs can name, and that workers download."""

    name: RegisteredName
    project: ProjectName = DEFAULT_PROJECT
    digest: Digest
    split: Literal["train", "test"]
    num_images: int
    channels: Literal[1, 3]
    image_size: int
    created_at: datetime


class EvaluationDatasetCreate(BaseModel):
    """A request to name labelled images whose file has been uploaded as an artifact."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: RegisteredName
    digest: Digest
    project: WantedProject = Field(
        default=None, description="The project whose runs may use them. Null: that of the token, or else `default`."
    )


class EvaluationDatasetView(View):
    """Labelled images on which encoders are evaluated. Workers cannot download them."""

    name: RegisteredName
    project: ProjectName = DEFAULT_PROJECT
    digest: Digest
    num_train: int
    num_test: int
    num_classes: int
    channels: Literal[1, 3]
    image_size: int
    created_at: datetime
