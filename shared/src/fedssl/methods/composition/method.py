"""A method, and a method bound to a run's spec: what the engine calls."""

import functools
from collections.abc import Callable
from dataclasses import dataclass

from fedssl.methods.composition.client import ClientAlgorithm
from fedssl.methods.composition.rounding import rounded_names, rounded_plan
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

    @functools.cached_property
    def plan(self) -> ArtifactPlan:
        """The run's artifact plan."""
        plan = self.restored_plan
        return rounded_plan(plan, self.spec.method.name) if self.spec.upload.rounds else plan

    @property
    def restored_plan(self) -> ArtifactPlan:
        """The plan of updates after their rounded weights are restored, with which everything is computed."""
        return self.server.plan

    @functools.cached_property
    def rounded(self) -> tuple[str, ...]:
        """The names of the weights that are rounded before they are sent."""
        return tuple(rounded_names(self.restored_plan)) if self.spec.upload.rounds else ()


@dataclass(frozen=True, slots=True)
class Method:
    """One method: its config, and how it is bound to a run's spec."""

    config: type[MethodConfig]
    bind: Callable[[RunSpec], BoundMethod]

    @property
    def name(self) -> str:
        """The name in specs."""
        name: str = self.config.model_fields["name"].default
        return name

    @property
    def version(self) -> int:
        """A number that differs whenever the mathematics or the plan does."""
        return self.config.info.version
