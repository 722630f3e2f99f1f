"""A method, and a method bound to a run's spec: what the engine calls."""

from collections.abc import Callable
from dataclasses import dataclass

from fedssl.methods.composition.client import ClientAlgorithm
from fedssl.methods.composition.server import ServerAlgorithm
from fedssl.protocol.methods.base import MethodConfig
from fedssl.protocol.plan import ArtifactPlan
from fedssl.protocol.runs import RunSpec


@dataclass(frozen=True)
class BoundMethod:
    """A method with the settings of one run."""

    spec: RunSpec
    client: ClientAlgorithm
    server: ServerAlgorithm

    @property
    def plan(self) -> ArtifactPlan:
        """The run's artifact plan."""
        return self.server.plan


@dataclass(frozen=True, slots=True)
class Method:
    """One method: its config, and how it is bound to a run's spec."""

    config: type[MethodConfig]
    bind: Callable[[RunSpec], BoundMethod]

    @property
    def name(self) -> str:
        """What a spec calls it."""
        name: str = self.config.model_fields["name"].default
        return name

    @property
    def version(self) -> int:
        """Differs wherever the mathematics or the plan does."""
        return self.config.info.version
