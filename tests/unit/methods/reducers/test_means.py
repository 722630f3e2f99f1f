"""L-DAWA and EUA as reducers: how they combine the clients' weights, compared with references from the equations."""

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from fedssl.artifacts.tensors import Tensors
from fedssl.methods import METHODS
from fedssl.protocol.runs import RunSpec
from fedssl.simulation import simulate
from support.methods import method_spec, shards
from support.rounds import aggregate, local_round, start


def _spec(reducer: dict[str, Any], host: str = "fedalignuniform", **more: Any) -> RunSpec:
    return method_spec(host, method={"name": host, "reducer": reducer}, **more)


def _updates(state: Tensors, num_clients: int, seed: int = 0) -> list[Tensors]:
    """Return the global weights with a random drift for each client."""
    generator = torch.Generator().manual_seed(seed)
    return [
        {
            name: value + 0.1 * torch.randn(value.shape, generator=generator)
            if value.is_floating_point()
            else value + 4
            for name, value in state.items()
        }
        for _ in range(num_clients)
    ]


def _is_statistic(name: str) -> bool:
    return name.endswith(("running_mean", "running_var", "num_batches_tracked"))


def _ldawa(tensors: list[torch.Tensor], previous: torch.Tensor) -> np.ndarray[Any, Any]:
    total, p = np.zeros(previous.shape), previous.double().numpy()
    for tensor in tensors:
        t = tensor.double().numpy()
        cosine = np.sum(t * p) / (np.linalg.norm(t) * np.linalg.norm(p)) if np.any(p) else 1.0
        total += min(1.0, cosine) * t
    return total / len(tensors)


def test_ldawa_scales_every_parameter_by_its_cosine_from_the_fourth_round_on() -> None:
    spec = _spec({"name": "ldawa"})
    state = start(spec).state
    updates = _updates(state, 3)
    after = aggregate(spec, state, list(zip((5, 50, 500), updates, strict=True)), number=4).state
    for name, value in state.items():
        tensors = [update[name] for update in updates]
        plain = np.mean([tensor.double().numpy() for tensor in tensors], axis=0)
        expected = plain if _is_statistic(name) else _ldawa(tensors, value)
        np.testing.assert_allclose(after[name].double().numpy(), expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(("number", "num_plain_rounds", "plain"), [(3, 3, True), (4, 3, False), (1, 0, False)])
def test_ldawas_first_rounds_are_plain_means(number: int, num_plain_rounds: int, plain: bool) -> None:  # noqa: FBT001
    spec = _spec({"name": "ldawa", "num_plain_rounds": num_plain_rounds})
    state = start(spec).state
    updates = _updates(state, 2)
    after = aggregate(spec, state, [(1, updates[0]), (99, updates[1])], number=number).state
    name = "encoder.blocks.0.conv.weight"
    mean = (updates[0][name].double() + updates[1][name].double()) / 2
    assert torch.allclose(after[name].double(), mean, rtol=1e-6) == plain


def test_ldawa_is_the_plain_mean_if_the_clients_equal_the_global_model() -> None:
    spec = _spec({"name": "ldawa", "num_plain_rounds": 0})
    state = start(spec).state
    after = aggregate(spec, state, [(5, dict(state)), (7, dict(state))], number=9).state
    assert all(torch.equal(after[name], value) for name, value in state.items())


def test_ldawa_can_scale_batch_norms_statistics_as_its_code_does() -> None:
    spec = _spec({"name": "ldawa", "num_plain_rounds": 0, "batch_norm": "scaled"})
    state = start(spec).state
    updates = _updates(state, 2)
    after = aggregate(spec, state, [(1, updates[0]), (1, updates[1])]).state
    name = "encoder.blocks.0.bn.running_var"
    expected = _ldawa([update[name] for update in updates], state[name])
    np.testing.assert_allclose(after[name].double().numpy(), expected, rtol=1e-5)


def test_eua_steps_along_the_shortest_combination_of_normalised_drifts() -> None:
    """For two clients, the shortest combination of two vectors of length 2 is their mean."""
    spec = _spec({"name": "eua", "server_learning_rate": 0.5})
    state = start(spec).state
    updates = _updates(state, 2)
    # With batches of 32, the clients have 2 and 6 batches.
    after = aggregate(spec, state, [(64, updates[0]), (192, updates[1])]).state
    names = [name for name in state if not _is_statistic(name)]
    flat = [np.concatenate([(state[n] - u[n]).double().numpy().ravel() for n in names]) for u in updates]
    step = 0.5 * np.mean([2 * g / np.linalg.norm(g) for g in flat], axis=0)
    moved = np.concatenate([(state[n].double() - after[n].double()).numpy().ravel() for n in names])
    np.testing.assert_allclose(moved, step, atol=2e-7)
    for name in state.keys() - set(names):
        expected = (2 * updates[0][name].double() + 6 * updates[1][name].double()) / 8
        np.testing.assert_allclose(after[name].double().numpy(), expected.numpy(), rtol=1e-6)


def test_euas_step_is_the_shortest_combination_and_opposes_no_clients_drift() -> None:
    """Among all convex combinations the step is the shortest, and no client's drift points the other way."""
    spec = _spec({"name": "eua", "server_learning_rate": 1.0})
    state = start(spec).state
    updates = _updates(state, 3, seed=5)
    after = aggregate(spec, state, [(64, update) for update in updates]).state
    names = [name for name in state if not _is_statistic(name)]
    flat = [np.concatenate([(state[n] - u[n]).double().numpy().ravel() for n in names]) for u in updates]
    unit = [2 * g / np.linalg.norm(g) for g in flat]
    moved = np.concatenate([(state[n].double() - after[n].double()).numpy().ravel() for n in names])
    grid = [(a, b, 1 - a - b) for a, b in itertools.product(np.linspace(0, 1, 21), repeat=2) if a + b <= 1]
    shortest = min(np.linalg.norm(sum(w * g for w, g in zip(ws, unit, strict=True))) for ws in grid)
    assert np.linalg.norm(moved) <= shortest * (1 + 1e-6)
    assert all(moved @ g > 0 for g in flat)


@pytest.mark.full(but=2)
@pytest.mark.parametrize("reducer", [{"name": "eua", "server_learning_rate": 0.3}, {"name": "ldawa"}])
@pytest.mark.parametrize("host", ["fedbyol", "supervised"])
def test_both_reducers_combine_the_weights_of_other_methods(reducer: dict[str, Any], host: str) -> None:
    spec = _spec(reducer, host, num_rounds=4)
    result = simulate(spec, shards(spec))
    assert all(bool(tensor.isfinite().all()) for tensor in result.model.values())
    assert any(not torch.equal(result.model[name], value) for name, value in result.initial.items())


def test_fedu2_has_both_of_its_parts_and_ldawa_its_reducer() -> None:
    fedu2, ldawa = method_spec("fedu2"), method_spec("ldawa")
    assert [add_on.name for add_on in fedu2.method.add_ons] == ["fur"]
    assert (fedu2.method.reducer.name, ldawa.method.reducer.name) == ("eua", "ldawa")
    defaults = RunSpec.model_validate({"method": {"name": "fedu2"}}).method
    assert defaults.reducer.server_learning_rate == 8.0
    assert defaults.add_ons[0].weight == 0.01


def test_local_training_does_not_depend_on_the_reducer() -> None:
    specs = [_spec({"name": name}) for name in ("mean", "ldawa", "eua")]
    updates = [local_round(spec, start(spec).broadcast).update for spec in specs]
    assert all(torch.equal(update[name], updates[0][name]) for update in updates for name in update)


@pytest.mark.parametrize(
    ("method", "rules"),
    [("fedsimclr", {"mean", "integral_mean"}), ("ldawa", {"method"}), ("fedu2", {"method"}), ("single", {"keep"})],
)
def test_the_plan_declares_how_tensors_are_reduced(method: str, rules: set[str]) -> None:
    spec = method_spec(method)
    plan = METHODS[method].bind(spec).plan
    assert {tensor.reduce for tensor in plan.broadcast} == rules


def test_the_step_size_of_eua_must_be_positive() -> None:
    with pytest.raises(ValidationError, match="greater than 0"):
        _spec({"name": "eua", "server_learning_rate": 0})
