"""Robust reducers in a run: how they combine the clients' weights, and which specs they refuse."""

from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from fedssl.aggregation import coordinate_median, geometric_median, multi_krum, trimmed_mean
from fedssl.artifacts.tensors import Tensors
from fedssl.methods import METHODS
from fedssl.protocol.runs import RunSpec
from fedssl.simulation import simulate
from support.methods import method_spec, shards
from support.rounds import aggregate, start

REDUCERS: dict[str, dict[str, Any]] = {
    "median": {"name": "median"},
    "trimmed_mean": {"name": "trimmed_mean"},
    "multi_krum": {"name": "multi_krum"},
    "geometric_median": {"name": "geometric_median"},
}
IMAGES = (5, 50, 500, 40, 60)


def _spec(reducer: dict[str, Any], host: str = "fedalignuniform", **more: Any) -> RunSpec:
    sections = {"cohort": {"min_clients": 5, "min_updates": 5}, **more}
    return method_spec(host, method={"name": host, "reducer": reducer}, **sections)


def _updates(state: Tensors) -> list[Tensors]:
    """Return the global weights with a random drift for each client."""
    generator = torch.Generator().manual_seed(0)
    return [
        {
            name: tensor + 0.1 * torch.randn(tensor.shape, generator=generator)
            if tensor.is_floating_point()
            else tensor + index
            for name, tensor in state.items()
        }
        for index in range(len(IMAGES))
    ]


@pytest.mark.parametrize("name", REDUCERS)
def test_a_round_combines_updates_by_the_rule_of_its_reducer(name: str) -> None:
    spec = _spec(REDUCERS[name])
    state = start(spec).state
    updates = _updates(state)
    expected = {
        "median": lambda: coordinate_median(updates),
        "trimmed_mean": lambda: trimmed_mean(updates, 1),
        "multi_krum": lambda: multi_krum(updates, 1, 4),
        "geometric_median": lambda: geometric_median(updates, IMAGES, 32, 1e-6),
    }[name]()
    after = aggregate(spec, state, list(zip(IMAGES, updates, strict=True))).state
    assert after.keys() == expected.keys()
    assert all(torch.equal(after[key], expected[key]) for key in expected)
    assert {tensor.reduce for tensor in METHODS[spec.method.name].bind(spec).plan.update} == {"method"}


@pytest.mark.parametrize("name", REDUCERS)
def test_an_update_that_is_not_finite_is_left_out_and_named(name: str) -> None:
    spec = _spec(REDUCERS[name], cohort={"min_clients": 6, "min_updates": 5})
    state = start(spec).state
    updates = _updates(state)
    broken = {key: torch.full_like(tensor, torch.nan) if tensor.is_floating_point() else tensor
              for key, tensor in state.items()}  # fmt: skip
    without = aggregate(spec, state, list(zip(IMAGES, updates, strict=True)))
    found = aggregate(spec, state, [*zip(IMAGES, updates, strict=True), (70, broken)])
    assert set(found.norms.rejected) == {"client-5"}
    assert all(torch.equal(tensor, without.state[key]) for key, tensor in found.state.items())


@pytest.mark.full(but=2)
@pytest.mark.parametrize("name", REDUCERS)
def test_a_simulation_is_finite_and_reproducible(name: str) -> None:
    """A whole run with five clients ends with finite weights, and with the same bits if it is repeated."""
    spec = _spec(
        REDUCERS[name],
        partition={"dataset": "digits", "num_clients": 5, "scheme": "iid", "max_images": 200},
    )
    one, other = (simulate(spec, shards(spec)).model for _ in range(2))
    assert all(torch.equal(one[key], other[key]) and bool(one[key].double().isfinite().all()) for key in one)


@pytest.mark.parametrize(
    ("reducer", "min_updates", "message"),
    [
        ({"name": "median"}, None, "needs 3 updates in every round: set cohort.min_updates to 3 or more"),
        ({"name": "median"}, 2, "needs 3 updates"),
        ({"name": "trimmed_mean", "num_trimmed": 2}, 4, "needs 5 updates"),
        ({"name": "multi_krum", "num_byzantine": 2}, 6, "needs 7 updates"),
        ({"name": "multi_krum", "num_selected": 9}, 8, "needs 9 updates"),
        ({"name": "geometric_median"}, 1, "needs 3 updates"),
    ],
)
def test_a_spec_whose_rounds_may_have_too_few_updates_is_refused(
    reducer: dict[str, Any], min_updates: int | None, message: str
) -> None:
    with pytest.raises(ValidationError, match=message):
        _spec(reducer, cohort={"min_updates": min_updates})


@pytest.mark.parametrize(
    ("method", "message"),
    [
        ({"name": "scaffold"}, "averages the control variates of scaffold"),
        ({"name": "fedrlc"}, "averages the cluster centers of crossed_kl"),
        ({"name": "orchestra"}, "averages the centroids of orchestra"),
        ({"name": "fedsimclr", "merge": {"name": "local"}}, "set method.reducer to none"),
    ],
)
def test_methods_with_averages_that_bypass_the_reducer_are_refused(method: dict[str, Any], message: str) -> None:
    cohort = {"min_clients": 3, "min_updates": 3}
    with pytest.raises(ValidationError, match=message):
        method_spec(method["name"], method={**method, "reducer": {"name": "median"}}, cohort=cohort)


def test_the_weight_of_a_client_is_capped_at_a_multiple_of_the_median() -> None:
    spec = method_spec("fedsimclr", robustness={"max_examples_ratio": 2.0})
    state = start(spec).state
    updates = _updates(state)
    claims = (10, 20, 30, 40, 10**9)
    found = aggregate(spec, state, list(zip(claims, updates, strict=True))).state
    for key, tensor in found.items():
        if tensor.is_floating_point():
            stacked = np.stack([update[key].double().numpy() for update in updates])
            expected = np.tensordot(np.array([10, 20, 30, 40, 60]) / 160, stacked, axes=1)
            np.testing.assert_allclose(tensor.double().numpy(), expected, rtol=1e-5, atol=1e-7)


def test_the_weight_of_a_client_is_capped_at_max_examples() -> None:
    spec = method_spec("fedsimclr", robustness={"max_examples": 60})
    state = start(spec).state
    updates = _updates(state)
    found, expected = (
        aggregate(each, state, list(zip(claims, updates, strict=True))).state
        for each, claims in ((spec, (10, 20, 30, 60, 10**9)), (method_spec("fedsimclr"), (10, 20, 30, 60, 60)))
    )
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], expected[key]) for key in found)


def test_unset_caps_are_omitted_from_specs_for_older_workers() -> None:
    assert "max_examples" not in method_spec("fedsimclr").model_dump()["robustness"]
    assert "max_examples_ratio" not in method_spec("fedsimclr").model_dump()["robustness"]
    with pytest.raises(ValidationError, match="greater than or equal to 1"):
        method_spec("fedsimclr", robustness={"max_examples_ratio": 0.5})
