"""Bounds on tensors other than weights: control variates, cluster centers, and rows of features.

The constants are worked out by hand.
"""

import math
from typing import Any

import pytest
import torch

from fedssl.artifacts.tensors import Tensors
from fedssl.engine import start_run
from fedssl.engine.norm_bounding import TooFewUpdates, bounded
from fedssl.engine.update_measures import Layout, Step, measure
from fedssl.errors import SpecError
from fedssl.methods import METHODS
from fedssl.methods.api import Context, Update
from fedssl.protocol.plan import ArtifactPlan, TensorSpec
from support.methods import context, method_spec

PLAN = ArtifactPlan(
    broadcast=(
        TensorSpec(name="centers.mu", dtype="F32", shape=(2,), kind="centers"),
        TensorSpec(name="control.w", dtype="F32", shape=(2,), kind="control"),
        TensorSpec(name="w", dtype="F32", shape=(2,)),
    ),
    update=(
        TensorSpec(name="centers.mu", dtype="F32", shape=(2,), kind="centers"),
        TensorSpec(name="control_delta.a", dtype="F32", shape=(1,), kind="control"),
        TensorSpec(name="control_delta.w", dtype="F32", shape=(2,), kind="control"),
        TensorSpec(name="rows", dtype="F32", shape=(3, 2), kind="dictionary"),
        TensorSpec(name="steps", dtype="I64", shape=()),
        TensorSpec(name="w", dtype="F32", shape=(2,)),
    ),
)
BROADCAST: Tensors = {
    "centers.mu": torch.tensor([1.0, 1.0]),
    "control.w": torch.tensor([9.0, 9.0]),
    "w": torch.tensor([1.0, 2.0]),
}
UPDATE: Tensors = {
    "centers.mu": torch.tensor([1.0, 11.0]),  # 10 from the broadcast
    "control_delta.a": torch.tensor([2.0]),
    "control_delta.w": torch.tensor([4.0, 4.0]),  # sqrt(4 + 16 + 16) = 6
    "rows": torch.tensor([[3.0, 4.0], [0.6, 0.8], [0.0, 0.0]]),  # 5, 1 and 0
    "steps": torch.tensor(7),
    "w": torch.tensor([4.0, 6.0]),  # (3, 4): 5 from the broadcast
}


def _ctx(**robustness: Any) -> Context:
    return Context(spec=method_spec("fedsimclr", robustness=robustness), round_number=1)


def _within(**robustness: Any) -> Tensors:
    updates = [Update("a", 1, lambda: UPDATE)]
    (kept,), norms = bounded(updates, BROADCAST, PLAN, _ctx(**robustness))
    assert norms.clipped.keys() == {"a"}
    return dict(kept.load())


def test_each_kind_of_norm_matches_a_value_worked_out_by_hand() -> None:
    assert measure(UPDATE, BROADCAST, Layout.of(PLAN)) == {
        "update_norm": 5.0,
        "update_center_norm": 10.0,
        "update_control_norm": 6.0,
        "update_feature_norm": 5.0,
    }


def test_the_cosine_matches_a_value_worked_out_by_hand() -> None:
    layout = Layout.of(PLAN)
    step = Step.between(BROADCAST, {**BROADCAST, "w": torch.tensor([1.0, 4.0])}, layout)  # (0, 2)
    assert measure(UPDATE, BROADCAST, layout, step)["update_cosine"] == pytest.approx(0.8)  # (3, 4) * (0, 1) / 5
    small = Step.between(BROADCAST, {**BROADCAST, "w": torch.tensor([1.0, 2.125])}, layout)
    assert measure(UPDATE, BROADCAST, layout, small)["update_cosine"] == pytest.approx(0.8)
    back = Step.between(BROADCAST, {**BROADCAST, "w": torch.tensor([-2.0, -2.0])}, layout)  # (-3, -4)
    assert measure(UPDATE, BROADCAST, layout, back)["update_cosine"] == -1.0
    still = Step.between(BROADCAST, BROADCAST, layout)
    assert "update_cosine" not in measure(UPDATE, BROADCAST, layout, still)


@pytest.mark.parametrize(
    ("setting", "limit", "expected"),
    [
        ("max_update_norm", 2.5, {"w": [2.5, 4.0]}),  # half of (3, 4)
        ("max_center_norm", 1.0, {"centers.mu": [1.0, 2.0]}),
        ("max_control_norm", 3.0, {"control_delta.a": [1.0], "control_delta.w": [2.0, 2.0]}),
        ("max_feature_norm", 2.5, {"rows": [[1.5, 2.0], [0.6, 0.8], [0.0, 0.0]]}),  # only the row beyond it
    ],
)
def test_each_kind_is_clipped_to_its_own_bound(setting: str, limit: float, expected: dict[str, Any]) -> None:
    found = _within(**{setting: limit})
    for name, tensor in UPDATE.items():
        want = torch.tensor(expected[name]) if name in expected else tensor
        assert torch.equal(found[name], want.to(tensor.dtype)), name


def test_all_bounds_apply_together() -> None:
    bounds = {"max_update_norm": 5.0, "max_center_norm": 5.0, "max_control_norm": 6.0, "max_feature_norm": 1.0}
    found = _within(**bounds)
    assert found["w"].tolist() == [4.0, 6.0]
    assert found["centers.mu"].tolist() == [1.0, 6.0]
    assert found["control_delta.w"].tolist() == [4.0, 4.0]
    torch.testing.assert_close(found["rows"], torch.tensor([[0.6, 0.8], [0.6, 0.8], [0.0, 0.0]]))


def test_a_rejected_update_lists_every_reason() -> None:
    with pytest.raises(TooFewUpdates) as caught:
        bounded([Update("a", 1, lambda: UPDATE)], BROADCAST, PLAN,
                _ctx(max_control_norm=5.0, max_feature_norm=1.01, action="reject"))  # fmt: skip
    assert caught.value.norms.rejected["a"] == (
        "its update_control_norm 6 is beyond robustness.max_control_norm 5; "
        "its update_feature_norm 5 is beyond robustness.max_feature_norm 1.01"
    )


def test_scalar_similarities_are_each_clipped_to_the_bound() -> None:
    plan = ArtifactPlan(broadcast=(), update=(TensorSpec(name="s", dtype="F16", shape=(3,), kind="similarity"),))
    sent = {"s": torch.tensor([0.5, -4.0, 1.0], dtype=torch.float16)}
    (kept,), norms = bounded([Update("a", 1, lambda: sent)], {}, plan, _ctx(max_feature_norm=1.0))
    assert norms.measures["a"] == {"update_feature_norm": 4.0}
    assert kept.load()["s"].tolist() == [0.5, -1.0, 1.0]
    assert kept.load()["s"].dtype == torch.float16


@pytest.mark.parametrize(
    ("name", "setting", "has_it"),
    [
        ("fedsimclr", "max_control_norm", False),
        ("fedsimclr", "max_feature_norm", False),
        ("fedsimclr", "max_center_norm", False),
        ("fedrlc", "max_center_norm", True),
        ("orchestra", "max_feature_norm", True),
        ("fedca", "max_feature_norm", True),
        ("flesd", "max_feature_norm", True),
        ("scaffold", "max_control_norm", True),
    ],
)
def test_a_bound_on_a_kind_that_the_method_does_not_send_is_refused_at_the_start(
    name: str,
    setting: str,
    has_it: bool,  # noqa: FBT001
) -> None:
    spec = method_spec(name, robustness={setting: 2.0})
    method = METHODS[spec.method.name]
    if has_it:
        start_run(method, context(spec, 0))
        return
    with pytest.raises(SpecError, match=rf"{name} sends no .*: leave robustness.{setting} out"):
        start_run(method, context(spec, 0))


@pytest.mark.parametrize("name", ["orchestra", "fedca"])
def test_honest_features_have_rows_of_norm_one(name: str) -> None:
    from fedssl.simulation import simulate
    from support.methods import shards

    spec = method_spec(name, num_rounds=1, robustness={"max_feature_norm": 1.01, "action": "reject"})
    (record,) = simulate(spec, shards(spec)).history
    assert not record.rejected
    for found in record.updates.values():
        assert math.isclose(found["update_feature_norm"], 1.0, abs_tol=1e-4)
