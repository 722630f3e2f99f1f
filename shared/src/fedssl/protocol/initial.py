"""The weights that a run starts from, in place of random ones."""

from typing import Annotated
from uuid import UUID

from pydantic import Field, StringConstraints, model_validator

from fedssl.protocol.base import Digest, StrictModel

ModuleName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_]+(\.[A-Za-z0-9_]+)*$", max_length=256)]


class InitialConfig(StrictModel):
    """The encoder's first weights: a file of weights, or a finished run of the same coordinator.

    The heads start from the run's seed. The coordinator loads the weights into the first broadcast, so clients need
    no file.
    """

    weights: str | None = Field(
        default=None,
        min_length=1,
        max_length=1000,
        description="The name under which weights were registered with the coordinator (`fedssl weights add`). In a "
        "simulation: the path of a safetensors file.",
    )
    run: UUID | None = Field(default=None, description="A finished run of the coordinator. Not in a simulation.")
    round: int | None = Field(
        default=None,
        ge=0,
        le=100_000,
        description="After which round of that run. Null: the last one; the coordinator records which one that was.",
    )
    adapt: tuple[ModuleName, ...] = Field(
        default=(),
        max_length=16,
        description="Convolutions whose input channels are summed or repeated if they differ, such as `conv1`, and a "
        "ViT's `pos_embed`, whose positions are interpolated for another image size.",
    )
    digest: Digest | None = Field(
        default=None, description="Digest of the weights. The coordinator sets it when the run is created."
    )

    @model_validator(mode="after")
    def _one_source(self) -> "InitialConfig":
        if (self.weights is None) == (self.run is None):
            raise ValueError("model.initial needs either weights or run: give one of them")
        if self.round is not None and self.run is None:
            raise ValueError("model.initial.round is the round of a run: give model.initial.run, or leave round out")
        if len(set(self.adapt)) != len(self.adapt):
            raise ValueError("model.initial.adapt lists a module twice: list each once")
        return self

    @property
    def source(self) -> str:
        """The origin of the weights, for people."""
        if self.weights is not None:
            return f"weights {self.weights}"
        return f"run {self.run}" + ("" if self.round is None else f", round {self.round}")
