"""The contract that every method must meet."""

from functools import partial
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError

from fedssl.artifacts.store import digest_of
from fedssl.artifacts.tensors import Tensors, check_file, load_tensors, read_tensors, save_tensors
from fedssl.engine import LocalResult, run_aggregation, run_local_round, start_run
from fedssl.methods import METHODS
from fedssl.methods.api import ClientData, Update
from fedssl.methods.site_data import client_data
from fedssl.protocol.methods import METHOD_CONFIGS
from fedssl.protocol.runs import RunSpec
from fedssl.simulation import simulate
from support.methods import (
    ALL_METHODS,
    ROUNDS_BEFORE_LEARNING,
    TRAINED_METHODS,
    context,
    method_spec,
    methods_of_this_run,
    shards,
)
from support.tensors import are_equal

every_method = pytest.mark.parametrize("name", ALL_METHODS)
methods_that_train = pytest.mark.parametrize("name", methods_of_this_run(ALL_METHODS))

SEED_OF_A_LATE_JOINER = 0  # its cohorts are {1, 2}, {1, 2}, {0, 1}


def _data(spec: RunSpec, client: str) -> ClientData:
    return client_data(shards(spec)[client], spec, client)


def _train(
    spec: RunSpec, broadcast: Tensors, state: Tensors | None, client: str = "client-0", number: int = 1
) -> LocalResult:
    ctx = context(spec, number, client)
    return run_local_round(METHODS[spec.method.name], broadcast, state, _data(spec, client), ctx)


@every_method
def test_every_config_has_its_method(name: str) -> None:
    assert METHODS.keys() == METHOD_CONFIGS.keys()
    assert METHODS[name].config is METHOD_CONFIGS[name]
    assert METHODS[name].name == name


@every_method
def test_a_method_describes_its_paper_what_leaves_the_client_and_its_settings(name: str) -> None:
    info = METHOD_CONFIGS[name].info
    assert all((info.title, info.paper, info.equations, info.leaves_the_client, info.stays_on_the_client))
    schema = METHOD_CONFIGS[name].model_json_schema()
    undescribed = [key for key, field in schema["properties"].items() if key != "name" and "description" not in field]
    assert undescribed == []


@every_method
def test_a_config_round_trips_and_refuses_unknown_keys(name: str) -> None:
    spec = method_spec(name)
    assert RunSpec.model_validate(spec.model_dump(mode="json")) == spec
    assert RunSpec.model_validate_json(spec.model_dump_json()) == spec
    with pytest.raises(ValidationError, match="Extra inputs are not permitted"):
        RunSpec.model_validate({**spec.model_dump(), "method": {**spec.method.model_dump(), "temprature": 1}})


@methods_that_train
def test_rounds_with_partial_participation_and_a_late_joiner_give_finite_weights(name: str) -> None:
    spec = method_spec(name, seed=SEED_OF_A_LATE_JOINER, cohort={"min_clients": 3, "fraction": 0.67}, num_rounds=3)
    result = simulate(spec, shards(spec))
    assert [len(record.clients) for record in result.history] == [2, 2, 2]
    assert len({client for record in result.history for client in record.clients}) == 3  # one client joined late
    assert all(bool(tensor.isfinite().all()) for tensor in result.model.values())


@pytest.mark.parametrize("name", methods_of_this_run(ALL_METHODS, ["fedmoco", "orchestra", "scaffold"]))
def test_a_run_repeats_bit_for_bit_and_depends_on_the_seed(name: str) -> None:
    spec = method_spec(name)
    first, again = simulate(spec, shards(spec)), simulate(spec, shards(spec))
    assert are_equal(first.model, again.model)
    assert all(are_equal(first.client_states[c], again.client_states[c]) for c in first.client_states)
    other = simulate(spec.model_copy(update={"seed": 12}), shards(spec))
    assert not are_equal(first.model, other.model)


@methods_that_train
def test_artifacts_match_the_plan_and_are_unchanged_by_safetensors(name: str, tmp_path: Path) -> None:
    spec = method_spec(name)
    method, plan = METHODS[name], METHODS[name].bind(spec).plan
    start = start_run(method, context(spec, 0))
    results = {client: _train(spec, start.received, None, client) for client in shards(spec)}
    for client, result in results.items():
        save_tensors(result.update, tmp_path / client)
        check_file(tmp_path / client, plan.update, "update")
        save_tensors(result.state, tmp_path / f"{client}-state")
        assert are_equal(load_tensors(tmp_path / f"{client}-state"), result.state)
    save_tensors(start.state, tmp_path / "state")
    ctx = context(spec, 1)
    in_memory = [
        Update(client, result.num_examples, lambda tensors=result.update: tensors)  # type: ignore[misc]
        for client, result in results.items()
    ]
    from_disk = [
        Update(client, result.num_examples, partial(read_tensors, tmp_path / client, digest_of(tmp_path / client)))
        for client, result in reversed(results.items())
    ]
    one = run_aggregation(method, start.state, in_memory, ctx)
    two = run_aggregation(method, load_tensors(tmp_path / "state"), from_disk, ctx)
    assert are_equal(one.state, two.state)
    assert are_equal(one.broadcast, two.broadcast)


@methods_that_train
def test_the_coordinator_combines_tensors_as_the_plan_declares(name: str) -> None:
    spec = method_spec(name)
    start = start_run(METHODS[name], context(spec, 0))
    sent = {client: _train(spec, start.received, None, client).update for client in ("client-0", "client-1")}
    updates = [Update(client, 200, lambda tensors=tensors: tensors) for client, tensors in sent.items()]  # type: ignore[misc]
    after = run_aggregation(METHODS[name], start.state, updates, context(spec, 1)).broadcast
    for tensor in METHODS[name].bind(spec).plan.broadcast:
        found, values = after[tensor.name], [update[tensor.name] for update in sent.values() if tensor.name in update]
        if tensor.reduce == "keep":
            assert torch.equal(found, start.broadcast[tensor.name])
        elif tensor.reduce in ("mean", "integral_mean"):
            assert found.is_floating_point() == (tensor.reduce == "mean")
            low, high = torch.minimum(*values), torch.maximum(*values)
            assert bool(((low <= found + 1e-6) & (found - 1e-6 <= high)).all())
        else:
            assert tensor.reduce == "method"


@methods_that_train
def test_a_crash_between_upload_and_acceptance_changes_nothing(name: str) -> None:
    """The next state is lost with the process. Trained again from the old state, the round has the same result."""
    spec = method_spec(name)
    start = start_run(METHODS[name], context(spec, 0))
    first = _train(spec, start.received, None)
    broadcast = start.received
    lost = _train(spec, broadcast, first.state, number=2)
    again = _train(spec, broadcast, first.state, number=2)
    assert are_equal(lost.update, again.update)
    assert are_equal(lost.state, again.state)


@methods_that_train
def test_a_client_that_lost_its_state_can_train_without_it(name: str) -> None:
    spec = method_spec(name)
    start = start_run(METHODS[name], context(spec, 0))
    cold = _train(spec, start.received, None, number=2)
    assert all(bool(tensor.isfinite().all()) for tensor in cold.update.values())


@methods_that_train
def test_client_state_is_not_in_the_plan(name: str) -> None:
    spec = method_spec(name)
    plan = METHODS[name].bind(spec).plan
    start = start_run(METHODS[name], context(spec, 0))
    result = _train(spec, start.received, None)
    assert result.update.keys() == {tensor.name for tensor in plan.update}
    assert not result.state.keys() & result.update.keys()


@pytest.mark.parametrize("name", methods_of_this_run(TRAINED_METHODS, ["fedmoco", "orchestra", "scaffold"]))
def test_the_loss_falls_on_real_images(name: str) -> None:
    spec = method_spec(name, num_rounds=6, training={"batch_size": 32, "local_epochs": 2})
    losses = [record.loss for record in simulate(spec, shards(spec)).history[ROUNDS_BEFORE_LEARNING.get(name, 0) :]]
    assert losses[0] is not None
    assert losses[-1] is not None
    assert losses[-1] < losses[0]
