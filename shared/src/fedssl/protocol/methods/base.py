"""What every method's config has in common."""

from typing import ClassVar

from pydantic import BaseModel, ConfigDict

from fedssl.protocol.base import StrictModel
from fedssl.protocol.model import ModelConfig


class MethodInfo(BaseModel):
    """What a person wants to know before choosing a method."""

    model_config = ConfigDict(frozen=True)

    title: str
    paper: str
    equations: str
    leaves_the_client: str
    stays_on_the_client: str
    version: int = 1
    """Raised when the method's mathematics or plan changes; a worker declines a version that it does not have."""


class MethodConfig(StrictModel):
    """A method's parameters. Subclasses set `name` to a literal with a default, and `info`."""

    info: ClassVar[MethodInfo]

    name: str

    def check(self, model: ModelConfig) -> None:
        """Raise ValueError, saying what to change, where the method cannot train this model."""
