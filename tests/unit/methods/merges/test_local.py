"""Training without a federation: every client by itself, or all images at one client."""

from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from fedssl.artifacts.tensors import check_file, load_tensors, save_tensors
from fedssl.data.partitioning import partition_dataset
from fedssl.methods import METHODS
from fedssl.protocol.runs import RunSpec
from fedssl.simulation import simulate
from support.methods import method_spec, shards
from support.rounds import local_round, start

ALONE = {"merge": {"name": "local"}, "reducer": {"name": "none"}}


def _spec(host: str, **more: Any) -> RunSpec:
    return method_spec(host, method={"name": host, **ALONE}, **more)


def test_nothing_is_sent_and_all_networks_are_kept(tmp_path: Any) -> None:
    spec = method_spec("single")
    plan = METHODS["single"].bind(spec).plan
    assert plan.update == ()
    result = local_round(spec, start(spec).broadcast)
    assert result.update == {}
    assert {name.split(".")[0] for name in result.state} == {
        "encoder", "projector", "predictor", "target_encoder", "target_projector"
    }  # fmt: skip
    save_tensors(result.update, tmp_path / "update")
    check_file(tmp_path / "update", plan.update, "update")
    assert load_tensors(tmp_path / "update") == {}


@pytest.mark.full(but=1)
@pytest.mark.parametrize("host", ["fedbyol", "fedsimclr", "supervised"])
def test_a_client_that_trains_alone_equals_a_federation_of_one(host: str) -> None:
    """The mean of one client is its own weights: FedAvg of one, round by round, bit for bit."""
    alone = _spec(host, num_rounds=3)
    together = method_spec(host, num_rounds=3, cohort={"min_clients": 1})
    everybody = simulate(alone, shards(alone))
    for client, images in shards(alone).items():
        one = simulate(together, {client: images})
        state = everybody.client_states[client]
        assert all(torch.equal(state[name], value) for name, value in one.model.items())


def test_the_global_model_does_not_change() -> None:
    spec = method_spec("single", num_rounds=2)
    result = simulate(spec, shards(spec))
    assert result.model.keys() == result.initial.keys()
    assert all(torch.equal(result.model[name], value) for name, value in result.initial.items())
    encoders = [state["encoder.blocks.0.conv.weight"] for state in result.client_states.values()]
    assert not torch.equal(encoders[0], encoders[1])


def test_a_client_that_lost_its_state_starts_from_the_initial_weights() -> None:
    spec = _spec("fedsimclr", training={"local_epochs": 0})
    broadcast = start(spec).broadcast
    assert all(
        torch.equal(local_round(spec, broadcast, number=5).state[name], value) for name, value in broadcast.items()
    )


def test_a_clients_own_weights_are_not_overwritten_by_the_broadcast() -> None:
    trained = local_round(_spec("fedsimclr"), start(_spec("fedsimclr")).broadcast).state
    idle = _spec("fedsimclr", training={"local_epochs": 0})
    kept = local_round(idle, start(idle).broadcast, number=2, state=trained).state
    assert all(torch.equal(kept[name], value) for name, value in trained.items())


@pytest.mark.parametrize(
    ("method", "reason"),
    [
        ({"name": "fedsimclr", "merge": {"name": "local"}}, "set method.reducer to none"),
        ({"name": "fedsimclr", "reducer": {"name": "none"}}, "set method.merge to local"),
        ({"name": "fedprox", **ALONE}, "proximal needs the global model"),
        ({"name": "scaffold", **ALONE}, "scaffold needs the global model"),
        ({"name": "fedx", **ALONE}, "distils the global model"),
    ],
)
def test_invalid_combinations_are_refused(method: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValidationError, match=reason):
        method_spec("fedsimclr", method=method)


def test_add_ons_without_a_global_model_can_be_used() -> None:
    spec = method_spec(
        "fedalignuniform", method={"name": "fedalignuniform", **ALONE, "add_ons": [{"name": "decorrelation"}]}
    )
    assert simulate(spec, shards(spec)).history[-1].loss is not None


def test_pooled_images_are_those_of_all_clients_at_one_client() -> None:
    spec = method_spec("fedsimclr", cohort={"min_clients": 1})
    assert spec.partition is not None
    dealt = partition_dataset(spec.partition, spec.data)
    pooled = partition_dataset(spec.partition.model_copy(update={"pooled": True}), spec.data)
    assert list(pooled.by_client) == ["client-0"]
    together = np.concatenate([images.images.reshape(len(images), -1) for images in dealt.by_client.values()])
    everything = pooled.by_client["client-0"].images.reshape(len(together), -1)
    order = [np.lexsort(images.T) for images in (together, everything)]
    assert np.array_equal(together[order[0]], everything[order[1]])
    assert np.array_equal(pooled.counts, dealt.counts.sum(axis=0, keepdims=True))


def test_centralised_training_is_a_simulation_on_pooled_images() -> None:
    spec = method_spec("fedbyol", cohort={"min_clients": 1})
    pooled = RunSpec.model_validate(
        {**spec.model_dump(), "partition": {**spec.model_dump()["partition"], "pooled": True}}
    )
    result = simulate(pooled)
    assert [record.num_examples for record in result.history] == [{"client-0": 360}] * spec.num_rounds
