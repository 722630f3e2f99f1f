"""SCAFFOLD: the corrected step, the update of the control variates, and what the coordinator and the clients keep."""

import dataclasses
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from fedssl.artifacts.tensors import Tensors
from fedssl.engine import run_aggregation
from fedssl.methods import METHODS
from fedssl.methods.api import Update
from fedssl.protocol.robustness import RobustnessConfig
from fedssl.protocol.runs import RunSpec
from fedssl.simulation import simulate
from support.methods import context, method_spec, shards
from support.rounds import aggregate, client_data, local_round, start, training

LR, MOMENTUM = 0.05, 0.9


def _spec(step_size: str = "momentum", host: str = "fedsimclr", momentum: float = MOMENTUM, **more: Any) -> RunSpec:
    add_on = {"name": "scaffold", "step_size": step_size}
    optimizer = {"learning_rate": LR, "momentum": momentum, "weight_decay": 0.0}
    training = {"batch_size": 32, "local_epochs": 2, "optimizer": optimizer}
    return method_spec(host, **{"method": {"name": host, "add_ons": [add_on]}, "training": training, **more})


def _part(tensors: Tensors, prefix: str) -> Tensors:
    return {name.removeprefix(f"{prefix}."): value for name, value in tensors.items() if name.startswith(f"{prefix}.")}


def _with_control(spec: RunSpec, seed: int) -> tuple[Tensors, Tensors]:
    """Return a broadcast with c, and a client state with c_k, both with random numbers."""
    generator = torch.Generator().manual_seed(seed)
    broadcast = dict(start(spec).broadcast)
    state: Tensors = {}
    for name, value in _part(broadcast, "control").items():
        broadcast[f"control.{name}"] = 0.01 * torch.randn(value.shape, generator=generator)
        state[f"scaffold_own.{name}"] = 0.01 * torch.randn(value.shape, generator=generator)
    return broadcast, state


def _by_the_algorithm(spec: RunSpec, broadcast: Tensors, state: Tensors, divisor: float) -> tuple[Tensors, Tensors]:
    """Return (w, c_k') after one round of Algorithm 1, option II, on FedSimCLR's loss."""
    host = spec.model_copy(update={"method": method_spec("fedsimclr").method})
    algorithm, ctx = METHODS["fedsimclr"].bind(host).client, context(host, 1, "client-0")
    modules = algorithm.build(ctx)
    modules.to(memory_format=torch.channels_last).train()  # type: ignore[call-overload]
    data = client_data(host, "client-0")
    weights = {name: value for name, value in broadcast.items() if not name.startswith("control.")}
    algorithm.merge(modules, weights, None, data, ctx)
    optimizer = torch.optim.SGD(modules.parameters(), lr=LR, momentum=spec.training.optimizer.momentum)
    c, c_k = _part(broadcast, "control"), _part(state, "scaffold_own")
    x = {name: value.detach().clone() for name, value in modules.named_parameters()}
    num_steps = 0
    for epoch in range(2):
        for batch in algorithm.batches(data, epoch, ctx):
            optimizer.zero_grad()
            algorithm.objective(modules, batch, ctx)[0]["nt_xent"].backward()
            optimizer.step()
            num_steps += 1
            with torch.no_grad():
                for name, parameter in modules.named_parameters():
                    parameter -= LR * (c[name] - c_k[name])
    w = {name: value.detach() for name, value in modules.named_parameters()}
    return w, {name: c_k[name] - c[name] + (x[name] - w[name]) / (num_steps * divisor) for name in w}


@pytest.mark.parametrize(
    ("step_size", "momentum", "divisor"),
    [("momentum", 0.9, LR / (1 - 0.9)), ("plain", 0.9, LR), ("momentum", 0.0, LR), ("plain", 0.0, LR)],
)
def test_a_round_follows_algorithm_1(step_size: str, momentum: float, divisor: float) -> None:
    spec = _spec(step_size, momentum=momentum)
    broadcast, state = _with_control(spec, seed=3)
    result = local_round(spec, broadcast, state=state)
    w, own = _by_the_algorithm(spec, broadcast, state, divisor)
    for name in w:
        torch.testing.assert_close(result.update[name], w[name], rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(result.state[f"scaffold_own.{name}"], own[name], rtol=1e-4, atol=1e-5)
        change = own[name] - state[f"scaffold_own.{name}"]
        torch.testing.assert_close(result.update[f"control_delta.{name}"], change, rtol=1e-4, atol=1e-5)


def test_the_first_round_is_that_of_fedavg_and_its_variates_are_mean_gradients() -> None:
    """Without momentum and with one step, c_k' is the gradient itself."""
    spec = _spec(momentum=0.0, training={"batch_size": 1000, "local_epochs": 1, "optimizer": {"momentum": 0.0}})
    spec = RunSpec.model_validate(
        {**spec.model_dump(), "training": {"batch_size": 1000, "optimizer": {"momentum": 0, "weight_decay": 0}}}
    )
    plain = RunSpec.model_validate({**spec.model_dump(), "method": {"name": "fedsimclr"}})
    broadcast = start(spec).broadcast
    corrected, uncorrected = local_round(spec, broadcast), local_round(plain, start(plain).broadcast)
    for name, value in uncorrected.update.items():
        assert torch.equal(corrected.update[name], value)
    client = training(plain)
    client.losses(client.batch())["nt_xent"].backward()  # type: ignore[no-untyped-call]
    for name, parameter in client.modules.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(corrected.state[f"scaffold_own.{name}"], parameter.grad, rtol=1e-3, atol=2e-5)


def test_variates_of_the_two_step_sizes_differ_by_the_momentum() -> None:
    broadcast = start(_spec()).broadcast
    momentum, plain = (local_round(_spec(step_size), broadcast).state for step_size in ("momentum", "plain"))
    for name, value in momentum.items():
        torch.testing.assert_close(plain[name], value / (1 - MOMENTUM), rtol=1e-5, atol=1e-9)


def test_both_step_sizes_converge_to_a_correction_that_cancels_the_drift() -> None:
    """With constant gradients g_k, SGD with momentum drifts by g_k lr / (1 - m) per step; c_k - c must become that."""
    gradients, m = torch.tensor([1.0, 3.0], dtype=torch.float64), MOMENTUM
    for divisor in (LR / (1 - m), LR):
        own, c = torch.zeros(2, dtype=torch.float64), torch.zeros((), dtype=torch.float64)
        for _ in range(200):
            moved_per_step = LR / (1 - m) * gradients + LR * (c - own)
            new = own - c + moved_per_step / divisor
            c, own = c + (new - own).mean(), new
        torch.testing.assert_close(own - c, (gradients - gradients.mean()) / (1 - m))


def test_the_coordinators_variate_moves_by_the_sampled_share() -> None:
    spec = _spec(cohort={"min_clients": 3, "fraction": 0.5})
    state = start(spec).state
    changes = [{name.replace("control.", "control_delta.", 1): torch.full_like(value, size) for name, value in
                state.items() if name.startswith("control.")} for size in (1.0, 3.0)]  # fmt: skip
    weights = {name: value for name, value in state.items() if not name.startswith("control.")}
    after = aggregate(spec, state, [(10, {**weights, **changes[0]}), (1000, {**weights, **changes[1]})]).state
    for name in _part(state, "control"):  # half of three clients is rounded to two
        torch.testing.assert_close(after[f"control.{name}"], torch.full_like(state[f"control.{name}"], 2 / 3 * 2.0))


def test_c_moves_by_at_most_the_mean_change_if_the_partition_has_too_few_clients() -> None:
    spec = _spec(cohort={}, partition={"dataset": "digits", "num_clients": 2})
    state = start(spec).state
    change = {name.replace("control.", "control_delta.", 1): torch.ones_like(value) for name, value in state.items()
              if name.startswith("control.")}  # fmt: skip
    weights = {name: value for name, value in state.items() if not name.startswith("control.")}
    after = aggregate(spec, state, [(10, {**weights, **change})] * 5).state
    for name in _part(state, "control"):
        torch.testing.assert_close(after[f"control.{name}"], state[f"control.{name}"] + 1)


def test_c_is_the_mean_of_the_clients_variates_with_full_participation() -> None:
    spec = _spec(num_rounds=3)
    result = simulate(spec, shards(spec))
    for name, c in _part(result.model, "control").items():
        own = torch.stack([state[f"scaffold_own.{name}"] for state in result.client_states.values()])
        torch.testing.assert_close(c, own.mean(dim=0), rtol=1e-4, atol=1e-6)
    assert any(float(c.abs().max()) > 0 for c in _part(result.model, "control").values())


@pytest.mark.parametrize("fraction", [0.1, 0.5, 0.6])
def test_c_is_the_mean_of_the_clients_variates_for_every_rounded_fraction(fraction: float) -> None:
    spec = _spec(num_rounds=3)
    clients = shards(spec)
    spec = _spec(num_rounds=3, cohort={"clients": list(clients), "fraction": fraction})
    result = simulate(spec, clients)
    for name, c in _part(result.model, "control").items():
        own = torch.stack([state[f"scaffold_own.{name}"] for state in result.client_states.values()])
        torch.testing.assert_close(c, own.sum(dim=0) / len(clients), rtol=1e-4, atol=1e-6)


def test_a_pooled_client_has_no_drift_to_correct() -> None:
    pooled = {"dataset": "digits", "num_clients": 3, "max_images": 120, "pooled": True}
    result = simulate(_spec(partition=pooled, cohort={}))
    own = _part(result.client_states["client-0"], "scaffold_own")
    for name, c in _part(result.model, "control").items():
        torch.testing.assert_close(c, own[name], rtol=1e-4, atol=1e-6)


def test_zero_epochs_do_not_change_the_variates() -> None:
    spec = _spec(training={"local_epochs": 0})
    broadcast, state = _with_control(spec, seed=1)
    result = local_round(spec, broadcast, state=state)
    assert all(float(change.abs().max()) == 0 for change in _part(result.update, "control_delta").values())
    assert all(torch.equal(result.state[name], value) for name, value in state.items())


def test_variates_are_declared_as_control_and_only_for_parameters() -> None:
    spec = _spec()
    plan = METHODS["fedsimclr"].bind(spec).plan
    down = {tensor.name: tensor for tensor in plan.broadcast if tensor.kind == "control"}
    up = {tensor.name: tensor for tensor in plan.update if tensor.kind == "control"}
    modules = training(spec).modules
    parameters = {name for name, parameter in modules.named_parameters() if parameter.requires_grad}
    assert down.keys() == {f"control.{name}" for name in parameters}
    assert up.keys() == {f"control_delta.{name}" for name in parameters}
    assert not any("running" in name for name in parameters)
    assert {tensor.reduce for tensor in (*down.values(), *up.values())} == {"method"}


def test_variates_cover_every_trained_head_but_no_target_network() -> None:
    supervised = _spec(host="supervised")
    assert "control.classifier.weight" in start(supervised).broadcast
    both = method_spec("fedsimclr", method={"name": "fedsimclr", "add_ons": [{"name": "scaffold"}, {"name": "fedx"}]})
    assert any(name.startswith("control.fedx_predictor.") for name in start(both).broadcast)
    byol = _spec(host="fedbyol")
    assert not any(name.startswith("control.target") for name in start(byol).broadcast)


def test_scaffold_does_not_change_the_initial_weights() -> None:
    spec = _spec()
    plain = start(method_spec("fedsimclr")).broadcast
    assert all(torch.equal(start(spec).broadcast[name], value) for name, value in plain.items())


def test_the_target_network_follows_the_corrected_weights() -> None:
    """The correction comes before BYOL's moving average."""
    spec = _spec(host="fedbyol", training={"batch_size": 1000, "optimizer": {"learning_rate": LR}})
    broadcast, variates = _with_control(spec, seed=2)
    result = local_round(spec, broadcast, state={**local_round(spec, broadcast).state, **variates})
    start_of_target = {
        name: local_round(spec, broadcast).state[name] for name in result.state if name.startswith("target_encoder.")
    }
    name = "encoder.blocks.0.conv.weight"
    expected = 0.99 * start_of_target[f"target_{name}"] + 0.01 * result.update[name]
    torch.testing.assert_close(result.state[f"target_{name}"], expected, rtol=1e-5, atol=1e-7)


def test_scaffold_requires_sgd_and_a_global_model() -> None:
    with pytest.raises(ValidationError, match=r"set training.optimizer.name to sgd"):
        _spec(training={"optimizer": {"name": "adam"}})
    with pytest.raises(ValidationError, match="scaffold needs the global model"):
        method_spec("scaffold", method={"name": "scaffold", "merge": {"name": "local"}, "reducer": {"name": "none"}})


@pytest.mark.parametrize("host", ["supervised", "fedalignuniform"])
def test_scaffold_can_be_added_to_other_methods(host: str) -> None:
    spec = method_spec(host, method={"name": host, "add_ons": [{"name": "scaffold"}, {"name": "proximal"}]})
    result = simulate(spec, shards(spec))
    assert all(bool(tensor.isfinite().all()) for tensor in result.model.values())


# A client that has lost its variate


def test_variates_restart_after_a_client_lost_its_own_as_worked_out_by_hand() -> None:
    """Two clients have one number each and the gradients 1 and 3, without momentum.

    With S s = 1, c_k' = c_k - c + (g_k + c - c_k) = g_k. Round 1: c_a = 1, c_b = 3, c = 0 + (1 + 3) / 2 = 2. Then b
    loses c_b. In round 2 it starts from 0 and sends 3 - 0 = 3, and a sends 1 - 1 = 0: c would become 2 + 3 / 2 = 3.5,
    not the mean, 2. Therefore c restarts from 0, and so do both variates: round 3 gives c_a = 1, c_b = 3, c = 2, their
    mean.
    """
    spec = _spec(cohort={"clients": ["client-0", "client-1"], "min_clients": 2})
    state = start(spec).state
    names = _part(state, "control")

    def after(state: Tensors, a: float, b: float, *, lost: str = "", spec: RunSpec = spec) -> Tensors:
        updates = []
        for name, value in (("client-0", a), ("client-1", b)):
            sent = {key: tensor for key, tensor in state.items() if not key.startswith("control.")}
            sent |= {f"control_delta.{key}": torch.full_like(tensor, value) for key, tensor in names.items()}
            updates.append(Update(name, 10, lambda tensors=sent: tensors))  # type: ignore[misc]
        ctx = dataclasses.replace(context(spec, 1), restarting=[lost])
        return run_aggregation(METHODS["fedsimclr"], state, updates, ctx).state

    def value_of(state: Tensors) -> set[float]:
        return {float(number) for tensor in _part(state, "control").values() for number in tensor.unique()}

    first = after(state, 1.0, 3.0)
    assert value_of(first) == {2.0}
    assert value_of(after(first, 0.0, 3.0)) == {3.5}  # without a restart the lost share stays in c
    second = after(first, 0.0, 3.0, lost="client-1")
    assert value_of(second) == {0.0}
    assert value_of(after(second, 1.0, 3.0)) == {2.0}
    bounded = spec.model_copy(update={"robustness": RobustnessConfig(max_control_norm=1e-3, action="reject")})
    assert value_of(after(first, 0.0, 3.0, lost="client-1", spec=bounded)) == {2.0}  # the lost c_k is still in c


@pytest.mark.full(but=1)
@pytest.mark.parametrize("fraction", [0.5, 1.0])
def test_c_becomes_the_mean_of_the_variates_again_after_clients_lost_their_own(fraction: float) -> None:
    spec = _spec(num_rounds=6)
    clients = shards(spec)
    spec = _spec(num_rounds=6, cohort={"clients": list(clients), "fraction": fraction})
    lost = {number: sorted(clients) for number in (3,)}
    result = simulate(spec, clients, lost_states=lost)
    assert any(float(c.abs().max()) > 0 for c in _part(result.model, "control").values())
    for name, c in _part(result.model, "control").items():
        own = torch.stack([state[f"scaffold_own.{name}"] for state in result.client_states.values()])
        torch.testing.assert_close(c, own.sum(dim=0) / len(clients), rtol=1e-4, atol=1e-6)


def test_a_lost_state_of_another_method_restarts_only_that_client() -> None:
    spec = method_spec("fedbyol", num_rounds=3)
    clients = shards(spec)
    whole = simulate(spec, clients)
    lost = simulate(spec, clients, lost_states={2: ["client-0"]})
    kept = simulate(spec, clients, lost_states={1: ["client-0"], 3: ["a client without images"]})
    assert all(torch.equal(kept.model[name], value) for name, value in whole.model.items())  # the client had no state
    assert not all(torch.equal(lost.model[name], value) for name, value in whole.model.items())
    assert lost.client_states.keys() == whole.client_states.keys()
