"""Registered weights, as the API shows them."""

from datetime import datetime
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from fedssl.protocol.base import Digest, RegisteredName
from fedssl.protocol.projects import DEFAULT_PROJECT, ProjectName, WantedProject
from fedssl.protocol.views.base import View

WeightsFamily = Literal["fedssl", "torchvision", "huggingface"]


class WeightsCreate(BaseModel):
    """A request to name weights whose file has been uploaded as an artifact."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: RegisteredName
    digest: Digest
    family: WeightsFamily = Field(description="Whose names the tensors had. `torchvision`: also timm's.")
    source_digest: Digest = Field(
        description="The SHA-256 of the file that the weights were read from, to compare with a published one."
    )
    project: WantedProject = Field(
        default=None, description="The project whose runs may use them. Null: that of the token, or else `default`."
    )


class WeightsView(View):
    """Weights that runs can start from. Workers cannot download them; they receive the first broadcast."""

    name: RegisteredName
    project: ProjectName = DEFAULT_PROJECT
    digest: Digest
    family: WeightsFamily
    source_digest: Digest
    num_tensors: int
    num_parameters: int
    created_at: datetime
