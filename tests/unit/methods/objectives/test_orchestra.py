"""Orchestra: its losses from the equations, its memory and centroids, and where the target network is kept."""

from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from fedssl.aggregation import global_centroids
from fedssl.artifacts.tensors import Tensors
from fedssl.methods import METHODS
from fedssl.methods.objectives.orchestra import EmbeddingMemory
from fedssl.protocol.runs import RunSpec
from fedssl.simulation import simulate
from support.methods import CONFIGS, method_spec, shards
from support.rounds import Training, aggregate, local_round, start, training


def _spec(**orchestra: Any) -> RunSpec:
    return method_spec("orchestra", method={"name": "orchestra", **CONFIGS["orchestra"], **orchestra})


def _memory(client: Training) -> EmbeddingMemory:
    memory = client.modules["memory"]
    assert isinstance(memory, EmbeddingMemory)
    return memory


def _apart(client: Training) -> Training:
    """Change the client's target network so that it differs from the online one, and return the client."""
    with torch.no_grad():
        for parameter in client.modules["target_encoder"].parameters():
            parameter.mul_(1.5)
    return client


def _softmax(scores: Any) -> Any:
    e = np.exp(scores - scores.max(axis=1, keepdims=True))
    return e / e.sum(axis=1, keepdims=True)


def _unit(z: Any) -> Any:
    return z / np.linalg.norm(z, axis=1, keepdims=True)


def test_the_losses_are_those_of_the_equations_with_the_target_updated_first() -> None:
    client = _apart(training(_spec(temperature=0.2, target_momentum=0.75, rotation_weight=2.0)))
    modules, batch = client.modules, client.batch()
    followed = {
        name: (0.75 * value + 0.25 * modules["encoder"].state_dict()[name]).clone()
        for name, value in modules["target_encoder"].named_parameters()
    }
    centroids = client.broadcast["global_centroids"].double().numpy()
    values = client.values(batch)
    for name, value in modules["target_encoder"].named_parameters():
        torch.testing.assert_close(value, followed[name])
    with torch.no_grad():
        t1 = modules["target_projector"](modules["target_encoder"](batch.views[0])).double().numpy()
        z2 = modules["projector"](modules["encoder"](batch.views[1])).double().numpy()
        turned = modules["rotation"](modules["projector"](modules["encoder"](batch.extra["rotated"]))).double().numpy()
    target, online = (_softmax(_unit(z) @ centroids.T / 0.2) for z in (t1, z2))
    assert values["clustering"] == pytest.approx(-(target * np.log(online)).sum(axis=1).mean(), rel=1e-4)
    quarters = [i % 4 for i in range(len(turned))]
    cross_entropy = -np.mean([np.log(_softmax(turned)[i, q]) for i, q in enumerate(quarters)])
    assert values["rotation"] == pytest.approx(2 * cross_entropy, rel=1e-4)
    newest = _memory(client).embeddings[-len(t1) :].double().numpy()
    np.testing.assert_allclose(newest, _unit(t1)[-len(newest) :], atol=1e-5)


def test_centroids_and_the_target_network_get_no_gradient() -> None:
    client = training(_spec())
    torch.stack(list(client.losses(client.batch()).values())).sum().backward()  # type: ignore[no-untyped-call]
    with_gradient = {name.split(".")[0] for name, p in client.modules.named_parameters() if p.grad is not None}
    assert with_gradient == {"encoder", "projector", "rotation"}


def test_without_rotation_there_is_neither_a_head_nor_a_stream_for_it() -> None:
    client = training(_spec(rotation_weight=0))
    batch = client.batch()
    assert batch.extra == {}
    assert "rotation" not in client.modules
    assert client.values(batch).keys() == {"clustering"}
    assert not any(name.startswith("rotation") for name in client.broadcast)


def test_the_first_round_only_clusters() -> None:
    spec = _spec()
    received = start(spec).broadcast
    first = local_round(spec, received)
    weights = {name: value for name, value in first.update.items() if name != "local_centroids"}
    assert all(torch.equal(value, received[name]) for name, value in weights.items())
    assert not any(name.startswith("loss") for name in first.metrics)
    torch.testing.assert_close(first.update["local_centroids"].norm(dim=1), torch.ones(4))
    second = local_round(spec, received, number=2, state=first.state)
    assert {"loss/clustering", "loss/rotation"} < second.metrics.keys()
    at_once = local_round(_spec(clustering_round=False), received)
    assert {"loss/clustering", "loss/rotation"} < at_once.metrics.keys()


def test_the_memory_is_first_in_first_out() -> None:
    memory = EmbeddingMemory(4, 2)
    memory.push(torch.tensor([[2.0, 0.0], [0.0, 3.0]]))
    memory.push(torch.tensor([[-1.0, 0.0]]))
    assert memory.embeddings.tolist() == [[0, 0], [1, 0], [0, 1], [-1, 0]]
    memory.push(torch.tensor([[1.0, 0.0]] * 5 + [[0.0, 1.0]]))
    assert memory.embeddings.tolist() == [[1, 0], [1, 0], [1, 0], [0, 1]]


def test_a_client_without_state_fills_its_memory_and_others_resume_theirs() -> None:
    spec = _spec()
    cold = training(spec, number=5)
    torch.testing.assert_close(_memory(cold).embeddings.norm(dim=1), torch.ones(32))
    result = local_round(spec, cold.broadcast, number=5)
    assert result.state.keys() == {"memory.embeddings", "memory.is_filled"}
    warm = training(spec, number=6, broadcast=cold.broadcast, state=result.state)
    assert torch.equal(_memory(warm).embeddings, result.state["memory.embeddings"])


def test_filling_the_memory_does_not_change_the_target_networks_statistics() -> None:
    client = training(_spec())
    state = client.modules.state_dict()
    assert all(torch.equal(state[name], value) for name, value in client.broadcast.items() if name in state)


def test_a_client_with_few_images_fills_its_memory_with_several_views() -> None:
    client = training(_spec())
    few = type(client.data)(client.data.images[:3])
    _memory(client).is_filled.zero_()
    client.algorithm.merge(client.modules, client.broadcast, None, few, client.ctx)
    assert bool((_memory(client).embeddings.norm(dim=1) > 0.99).all())
    update, _ = client.algorithm.finish(
        client.modules, few, client.algorithm.schedule(len(few), client.ctx), client.ctx
    )
    assert update["local_centroids"].shape == (4, 8)


def test_the_coordinator_clusters_all_local_centroids_starting_from_the_previous_ones() -> None:
    spec = _spec()
    state = start(spec).state
    torch.testing.assert_close(state["global_centroids"].norm(dim=1), torch.ones(16))
    updates = [local_round(spec, state, client=f"client-{k}").update for k in range(3)]
    after = aggregate(spec, state, [(10, update) for update in updates]).state
    expected = global_centroids(
        torch.cat([update["local_centroids"] for update in updates]),
        16,
        generator=torch.Generator().manual_seed(0),
        initial_MD=state["global_centroids"],
        num_steps=50,
    )
    assert torch.equal(after["global_centroids"], expected)
    assert not torch.equal(after["global_centroids"], state["global_centroids"])


@pytest.mark.parametrize("target", ["shared", "kept"])
def test_the_target_network_is_sent_or_kept(target: str) -> None:
    spec = _spec(target=target)
    received = start(spec).broadcast
    first = local_round(spec, received)
    sent, kept = ({name.split(".")[0] for name in tensors} for tensors in (first.update, first.state))
    targets = {"target_encoder", "target_projector"}
    assert targets <= (sent if target == "shared" else kept)
    assert not targets & (kept if target == "shared" else sent)
    other: Tensors = {name: value + 1 if value.is_floating_point() else value for name, value in received.items()}
    client = training(spec, number=2, broadcast=other, state=first.state)
    now, source = client.modules["target_encoder"].state_dict(), (other if target == "shared" else first.state)
    assert all(torch.equal(value, source[f"target_encoder.{name}"]) for name, value in now.items())


def test_a_kept_target_starts_as_a_copy_of_the_received_network() -> None:
    spec = _spec(target="kept")
    received = start(spec).broadcast
    other: Tensors = {name: value + 1 if value.is_floating_point() else value for name, value in received.items()}
    client = training(spec, number=3, broadcast=other)
    now = client.modules["target_encoder"].state_dict()
    assert all(torch.equal(value, other[f"encoder.{name}"]) for name, value in now.items())


def test_a_run_with_a_kept_target_stays_finite() -> None:
    spec = _spec(target="kept", clustering_round=False)
    result = simulate(spec, shards(spec))
    assert all(bool(tensor.isfinite().all()) for tensor in result.model.values())


def test_centroids_are_declared_as_such() -> None:
    spec = _spec()
    plan = METHODS["orchestra"].bind(spec).plan
    (down,) = [tensor for tensor in plan.broadcast if tensor.kind == "centroids"]
    (up,) = [tensor for tensor in plan.update if tensor.kind == "centroids"]
    assert (down.name, down.shape, down.reduce) == ("global_centroids", (16, 8), "method")
    assert (up.name, up.shape, up.reduce) == ("local_centroids", (4, 8), "method")


@pytest.mark.parametrize(
    ("orchestra", "more", "reason"),
    [
        ({"num_local_centroids": 33}, {}, "more than the 32 embeddings that are clustered"),
        ({}, {"model": {"projector": None}}, "describe model.projector"),
        ({"merge": {"name": "local"}, "reducer": {"name": "none"}}, {}, "learns from what the other clients send"),
        ({"add_ons": [{"name": "hsd", "variant": "mask"}]}, {}, "hsd"),
        ({"merge": {"name": "dapu"}}, {}, "predictor"),
    ],
)
def test_invalid_combinations_are_refused(orchestra: dict[str, Any], more: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValidationError, match=reason):
        method_spec("orchestra", method={"name": "orchestra", **CONFIGS["orchestra"], **orchestra}, **more)
