"""FedEMA's merge rule: its coefficient, what it mixes, and when it does not mix."""

from typing import Any

import numpy as np
import pytest
import torch

from fedssl.artifacts.tensors import Tensors
from fedssl.protocol.runs import RunSpec
from fedssl.simulation import simulate
from support.methods import CONFIGS, method_spec, shards
from support.rounds import local_round, start, training

STATISTICS = ("running_mean", "running_var", "num_batches_tracked")
MIXED = ("encoder", "projector", "predictor")


def _spec(host: str = "fedema", **ema: Any) -> RunSpec:
    return method_spec(host, method={"name": host, "merge": {"name": "ema", **ema}})


def _noisy(tensors: Tensors, seed: int, scale: float = 0.05) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: value + scale * torch.rand(value.shape, generator=generator) if value.is_floating_point() else value
        for name, value in tensors.items()
    }


def _flat(tensors: Tensors, modules: tuple[str, ...], prefix: str = "") -> np.ndarray:
    """Return all parameters of the modules as one float64 vector."""
    names = [n for n in sorted(tensors) if not n.endswith(STATISTICS)]
    chosen = [n for n in names if any(n.startswith(f"{prefix}{module}.") for module in modules)]
    return np.concatenate([tensors[n].double().numpy().ravel() for n in chosen])


def _received(spec: RunSpec, broadcast: Tensors, state: Tensors | None, number: int) -> tuple[Tensors, Tensors]:
    """Return the weights and the state of the merge rule right after a download."""
    modules = training(spec, number=number, broadcast=broadcast, state=state).modules
    memory = {f"ema.{name}": value for name, value in modules["ema"].state_dict().items()}
    others = {n: m for n, m in modules.items() if n != "ema"}
    return {f"{name}.{key}": v for name, m in others.items() for key, v in m.state_dict().items()}, memory


@pytest.mark.parametrize("variant", ["paper", "reference"])
@pytest.mark.parametrize("tau", [0.7, 0.8, 0.3])
def test_the_coefficient_is_tau_in_the_first_mixed_round(variant: str, tau: float) -> None:
    spec = _spec(variant=variant, tau=tau)
    broadcast = start(spec).broadcast
    state = local_round(spec, broadcast).state
    _, memory = _received(spec, _noisy(broadcast, 1), state, 2)
    assert memory["ema.coefficient"] == torch.tensor(tau)


def test_the_papers_coefficient_follows_its_equation_over_three_rounds() -> None:
    """The expected values follow the equation: mu = min(tau d_r / d_1, 1), w = mu w_k + (1 - mu) w_*."""
    spec = _spec()
    broadcast = start(spec).broadcast
    result = local_round(spec, broadcast)
    first: float | None = None
    for number in (2, 3, 4):
        own, global_ = result.update, _noisy(broadcast, number, scale=0.02 * number**2)
        distance = np.linalg.norm(_flat(global_, ("encoder", "projector")) - _flat(own, ("encoder", "projector")))
        first = distance if first is None else first
        mu = min(0.7 * distance / first, 1.0)
        weights, memory = _received(spec, global_, result.state, number)
        assert float(memory["ema.coefficient"]) == pytest.approx(mu, rel=1e-5)
        expected = mu * _flat(own, MIXED) + (1 - mu) * _flat(global_, MIXED)
        np.testing.assert_allclose(_flat(weights, MIXED), expected, atol=1e-6)
        result = local_round(spec, global_, number=number, state=result.state)
    assert mu == 1.0  # far enough apart: the client keeps its own weights


def test_easyfls_coefficient_follows_the_local_drift() -> None:
    spec = _spec(variant="reference")
    broadcast = start(spec).broadcast
    result = local_round(spec, broadcast)
    convolutions = [f"encoder.blocks.{layer}.conv.weight" for layer in (0, 1)]

    def drift(before: Tensors, after: Tensors) -> float:
        return float(np.mean([np.linalg.norm((after[n] - before[n]).double().numpy()) for n in convolutions]))

    first = drift(broadcast, result.update)
    global_ = _noisy(broadcast, 5)
    started, _ = _received(spec, global_, result.state, 2)
    second_round = local_round(spec, global_, number=2, state=result.state)
    second = drift(started, second_round.update)
    _, memory = _received(spec, _noisy(broadcast, 6), second_round.state, 3)
    assert float(memory["ema.first"]) == pytest.approx(first, rel=1e-5)
    assert float(memory["ema.coefficient"]) == pytest.approx(min(0.7 * second / first, 1), rel=1e-4)


def test_statistics_are_the_global_ones_and_the_target_network_is_kept() -> None:
    spec = _spec()
    broadcast = start(spec).broadcast
    state, later = local_round(spec, broadcast).state, _noisy(broadcast, 2)
    weights, _ = _received(spec, later, state, 2)
    statistics = [name for name in later if name.endswith(STATISTICS)]
    assert statistics
    assert all(torch.equal(weights[name], later[name]) for name in statistics)
    targets = [name for name in state if name.startswith("target_")]
    assert targets
    assert all(torch.equal(weights[name], state[name]) for name in targets)


def test_a_client_that_missed_a_round_takes_the_global_network_also_as_its_target() -> None:
    spec = _spec()
    broadcast = start(spec).broadcast
    state, later = local_round(spec, broadcast).state, _noisy(broadcast, 3)
    weights, memory = _received(spec, later, state, 3)
    assert all(torch.equal(weights[name], value) for name, value in later.items())
    for name in later:
        if name.split(".")[0] in ("encoder", "projector"):
            assert torch.equal(weights[f"target_{name}"], later[name])
    assert float(memory["ema.first"]) == 0  # its lambda is still to be set


@pytest.mark.parametrize("number", [2, 3])
def test_a_client_that_missed_a_round_takes_the_global_network_as_dinos_teacher(number: int) -> None:
    spec = _spec("feddino")
    broadcast = start(spec).broadcast
    state, later = local_round(spec, broadcast).state, _noisy(broadcast, 3)
    weights, _ = _received(spec, later, state, number)
    for module in ("encoder", "projector", "prototypes"):
        names = [name for name in later if name.startswith(f"{module}.")]
        assert names
        expected = state if number == 2 else weights
        prefix = "teacher_" if number == 2 else ""
        assert all(torch.equal(weights[f"teacher_{name}"], expected[f"{prefix}{name}"]) for name in names)


@pytest.mark.parametrize("target", ["shared", "kept"])
def test_a_client_that_missed_a_round_takes_the_averaged_target_network_if_it_is_sent(target: str) -> None:
    """Orchestra's `shared` target is averaged: the global target is not the online network."""
    spec = method_spec(
        "orchestra", method={"name": "orchestra", **CONFIGS["orchestra"], "target": target, "merge": {"name": "ema"}}
    )
    broadcast = start(spec).broadcast
    state, later = local_round(spec, broadcast).state, _noisy(broadcast, 3)
    weights, _ = _received(spec, later, state, 3)
    names = [name for name in later if name.split(".")[0] in ("encoder", "projector")]
    prefix = "target_" if target == "shared" else ""
    assert all(torch.equal(weights[f"target_{name}"], later[f"{prefix}{name}"]) for name in names)


@pytest.mark.parametrize("number", [2, 3])
def test_mocos_key_network_starts_as_a_copy_of_the_online_network(number: int) -> None:
    spec = _spec("fedmoco")
    broadcast = start(spec).broadcast
    weights, _ = _received(spec, _noisy(broadcast, 3), local_round(spec, broadcast).state, number)
    keys = [name for name in weights if name.startswith("key_")]
    assert keys
    assert all(torch.equal(weights[name], weights[name.removeprefix("key_")]) for name in keys)


def test_a_stale_network_is_mixed_in_if_selective_is_off() -> None:
    spec = _spec(selective=False)
    broadcast = start(spec).broadcast
    state = local_round(spec, broadcast).state
    weights, memory = _received(spec, _noisy(broadcast, 3), state, 9)
    assert memory["ema.coefficient"] == torch.tensor(0.7)
    assert torch.equal(weights["target_encoder.blocks.0.conv.weight"], state["target_encoder.blocks.0.conv.weight"])


@pytest.mark.parametrize("number", [1, 4])
def test_without_a_client_state_the_global_network_is_taken(number: int) -> None:
    spec = _spec()
    broadcast = _noisy(start(spec).broadcast, 4)
    weights, _ = _received(spec, broadcast, None, number)
    assert all(torch.equal(weights[name], value) for name, value in broadcast.items())


def test_the_coefficient_is_capped() -> None:
    spec = _spec(cap=0.7, tau=0.9)
    broadcast = start(spec).broadcast
    _, memory = _received(spec, _noisy(broadcast, 1), local_round(spec, broadcast).state, 2)
    assert memory["ema.coefficient"] == torch.tensor(0.7)


def test_a_single_client_does_not_set_lambda() -> None:
    """A distance of 0 does not set lambda, so nothing is divided by it."""
    spec = _spec()
    result = local_round(spec, start(spec).broadcast)
    weights, memory = _received(spec, result.update, result.state, 2)
    assert float(memory["ema.first"]) == 0
    assert all(torch.equal(weights[name], value) for name, value in result.update.items())


@pytest.mark.parametrize(
    ("rounded", "tolerance"),
    [({"aggregation": {"arithmetic": "fixed"}}, 1e-3), ({"upload": {"dtype": "bfloat16"}}, 0.1)],
    ids=["fixed", "bfloat16"],
)
def test_rounding_errors_do_not_set_lambda(rounded: dict[str, Any], tolerance: float) -> None:
    """The only client of a round receives its own network, except for rounding, including that of an earlier upload.

    The learning rate of the first round is the largest, and so is the rounding error of its upload.
    """
    cohorts = {1: ["client-0"], 2: ["client-0"], 3: ["client-0", "client-1"], 4: ["client-0"]}
    table = {"batch_size": 32, "local_epochs": 1, "optimizer": {"learning_rate": 0.3}}
    numbers = []
    for changes in ({}, rounded):
        spec = method_spec("fedema", num_rounds=4, training=table, **changes)
        state = simulate(spec, shards(spec), cohorts=cohorts).client_states["client-0"]
        numbers.append((float(state["ema.first"]), float(state["ema.coefficient"])))
    assert numbers[1] == pytest.approx(numbers[0], rel=tolerance)
    assert numbers[0][1] == pytest.approx(0.7)


@pytest.mark.full(but=1)
@pytest.mark.parametrize("host", ["ssd", "fedsimclr", "fedmoco", "supervised"])
def test_fedemas_merge_works_with_other_objectives(host: str) -> None:
    """For example, SSD can use FedEMA's merge."""
    spec = method_spec(host, num_rounds=3, method={"name": host, "merge": {"name": "ema"}})
    result = simulate(spec, shards(spec))
    coefficients = [float(state["ema.coefficient"]) for state in result.client_states.values()]
    assert all(0 < coefficient <= 1 for coefficient in coefficients)
    plain = simulate(method_spec(host, num_rounds=3), shards(spec))
    assert any(not torch.equal(result.model[name], plain.model[name]) for name in plain.model)
