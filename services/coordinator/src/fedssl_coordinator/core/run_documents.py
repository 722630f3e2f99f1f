"""Reads the spec and the plan that a run's row has, which a newer version may have written."""

from collections.abc import Mapping
from typing import Any, TypeVar
from uuid import UUID

from pydantic import BaseModel, ValidationError

from fedssl.protocol.plan import ArtifactPlan
from fedssl.protocol.runs import RunSpec
from fedssl.protocol.validation import dotted, first_problem
from fedssl_coordinator.core.models import Run
from fedssl_coordinator.core.problems import ProblemError

M = TypeVar("M", bound=BaseModel)


class NewerSpecError(ProblemError):
    """A run of a newer coordinator has a setting, or a tensor of a kind, that this version does not know, for example
    after a rollback. `part`: the spec or the plan."""

    def __init__(self, part: str, run_id: UUID, error: ValidationError) -> None:
        found = first_problem(error)
        what = f"{dotted(found.location)}: {found.message}"
        super().__init__(
            "conflict",
            f"this version of the coordinator does not understand the {part} of run {run_id} ({what}): "
            "upgrade the coordinator, and resume the run if it is paused",
        )
        self.run_id = run_id


def spec_of(run: Run) -> RunSpec:
    """Return the spec of a run. Raises NewerSpecError."""
    return parsed(RunSpec, "spec", run.id, run.spec)


def plan_of(run: Run) -> ArtifactPlan:
    """Return the plan of a prepared run. Raises NewerSpecError."""
    return parsed(ArtifactPlan, "plan", run.id, run.plan)


def parsed(model: type[M], part: str, run_id: UUID, stored: Mapping[str, Any] | None) -> M:
    """Return a part of a run. Raises NewerSpecError."""
    try:
        return model.model_validate(stored)
    except ValidationError as error:
        raise NewerSpecError(part, run_id, error) from None
