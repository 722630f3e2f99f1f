"""The artifact plan, and the messages between workers and the coordinator."""

from typing import Any
from uuid import uuid4

import pytest
from pydantic import ValidationError

from fedssl.protocol.errors import Problem
from fedssl.protocol.plan import ArtifactPlan, TensorSpec
from fedssl.protocol.work import Claim, Decline, Heartbeat, Progress, Register, Submit

TENSOR = TensorSpec(name="encoder.weight", dtype="F32", shape=(2, 3))


def test_a_plan_can_be_converted_to_json_and_back() -> None:
    plan = ArtifactPlan(broadcast=(TENSOR,), update=(TENSOR, TENSOR.model_copy(update={"name": "b", "shape": ()})))
    assert ArtifactPlan.model_validate(plan.model_dump(mode="json")) == plan
    assert ArtifactPlan.model_validate_json(plan.model_dump_json()) == plan


@pytest.mark.parametrize("direction", ["broadcast", "update"])
def test_a_tensor_that_is_declared_twice_is_refused(direction: str) -> None:
    tensors = {"broadcast": (TENSOR,), "update": (TENSOR,), direction: (TENSOR, TENSOR)}
    with pytest.raises(ValidationError, match=f"the plan's {direction} declares a tensor twice"):
        ArtifactPlan.model_validate(tensors)


@pytest.mark.parametrize(
    "values",
    [
        {"name": ""},
        {"name": "a..b"},
        {"name": ".a"},
        {"name": "a b"},
        {"name": "a\n"},
        {"name": "__metadata__\x00"},
        {"name": "x" * 257},
        {"dtype": "BOOL"},
        {"dtype": "f32"},
        {"shape": (-1,)},
        {"shape": (1,) * 9},
        {"shape": (1.5,)},
        {"kind": "images"},
        {"reduce": "max"},
        {"pickle": True},
    ],
)
def test_invalid_tensor_specs_are_refused(values: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        TensorSpec.model_validate({**TENSOR.model_dump(), **values})


def _submit(**changes: Any) -> dict[str, Any]:
    return {"assignment_id": str(uuid4()), "update": "0" * 64, "num_examples": 1, **changes}


@pytest.mark.parametrize(
    ("model", "values"),
    [
        (Submit, _submit(num_examples=0)),
        (Submit, _submit(num_examples=10**12 + 1)),
        (Submit, _submit(metrics={"Loss": 1.0})),
        (Submit, _submit(metrics={"loss/": 1.0})),
        (Submit, _submit(metrics={"x" * 65: 1.0})),
        (Submit, _submit(metrics={"loss": float("nan")})),
        (Submit, _submit(metrics={"loss": float("inf")})),
        (Submit, _submit(metrics={f"m{i}": 0.0 for i in range(65)})),
        (Claim, {"wait_seconds": -0.1}),
        (Claim, {"wait_seconds": 61}),
        (Decline, {"assignment_id": str(uuid4()), "reason": "x" * 501}),
        (Heartbeat, {"progress": {"phase": "training"}}),
        (Progress, {"phase": "training", "epoch": -1, "num_epochs": 1, "step": 0, "num_steps": 0}),
        (Register, {"worker_version": "1", "methods": {}, "device": "cpu", "num_images": 0, "channels": 1,
                    "image_size": 8}),
    ],
)  # fmt: skip
def test_invalid_messages_are_refused(model: Any, values: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        model.model_validate(values)


def test_names_of_metrics_may_have_a_slash() -> None:
    assert Submit.model_validate(_submit(metrics={"loss/alignment": 0.5})).metrics == {"loss/alignment": 0.5}


def test_a_problem_with_unknown_keys_can_be_read() -> None:
    """Errors come from a coordinator that may be newer than its client."""
    problem = Problem.model_validate({"type": "urn:x", "title": "T", "status": 418, "detail": "d", "instance": "/new"})
    assert problem.detail == "d"
