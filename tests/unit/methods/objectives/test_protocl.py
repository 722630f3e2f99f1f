"""FedProtoCL: its prototypes cluster the key network's embeddings, its loss is the equation's, and it warms up."""

import copy
from typing import Any

import numpy as np
import pytest
import torch

from fedssl.losses import prototype_concentrations
from fedssl.methods.objectives.protocl import Clusterings, Prototypes
from fedssl.protocol.runs import RunSpec
from fedssl.simulation import simulate
from support.methods import method_spec, shards
from support.rounds import Training, local_round, start, training


def _spec(num_rounds: int = 2, **protocl: Any) -> RunSpec:
    return method_spec("fedprotocl", method={"name": "fedprotocl", **protocl}, num_rounds=num_rounds)


def _found(client: Training, epoch: int = 0) -> list[Prototypes]:
    client.algorithm.begin_epoch(client.modules, client.data, epoch, client.ctx)
    clusterings = client.modules["prototypes"]
    assert isinstance(clusterings, Clusterings)
    return clusterings.current


def _contrast(query: Any, centroids: Any, assignments: Any, concentrations: Any) -> float:
    """Compute the second term of Li et al. 2021, Eq. 11, query by query."""
    query = query / np.linalg.norm(query, axis=1, keepdims=True)
    terms = []
    for q, s in zip(query, assignments, strict=True):
        scores = [q @ c / phi for c, phi in zip(centroids, concentrations, strict=True)]
        terms.append(np.log(np.sum(np.exp(scores))) - scores[s])
    return float(np.mean(terms))


def test_the_prototypical_loss_is_the_mean_over_the_clusterings_for_both_views() -> None:
    client = training(_spec(images_per_cluster=[40, 20, 10]))
    found, batch = _found(client), client.batch()
    with torch.no_grad():
        queries = [client.modules["projector"](client.modules["encoder"](x)).double().numpy() for x in batch.views]
    expected = 0.0
    for each in found:
        own = each.assignments[batch.indices].tolist()
        centroids, phi = each.centroids.double().numpy(), each.concentrations.double().numpy()
        expected += sum(_contrast(query, centroids, own, phi) for query in queries) / len(found)
    values = client.values(batch)
    assert values["prototypes"] == pytest.approx(expected, rel=1e-4)
    assert values["info_nce"] > 0


def test_prototypes_are_clusters_of_the_key_networks_embeddings_in_evaluation_mode() -> None:
    client = training(_spec(images_per_cluster=[20], temperature=0.2))
    with torch.no_grad():  # a key network that differs from the online one
        next(client.modules["key_projector"].parameters()).mul_(-1.0)
    network = torch.nn.Sequential(client.modules["key_encoder"], client.modules["key_projector"])
    before = {name: value.clone() for name, value in network.state_dict().items()}
    (found,) = _found(client)
    assert all(torch.equal(value, before[name]) for name, value in network.state_dict().items())
    assert all(module.training for module in network.modules())
    network.eval()
    with torch.no_grad():
        z = network(client.data.images.float() / 255).double()
    unit = z / z.norm(dim=1, keepdim=True)
    assert torch.equal(found.assignments, (unit @ found.centroids.double().T).argmax(dim=1))
    for cluster in range(len(found.centroids)):  # a centroid is the direction of its members, up to the last update
        members = unit[found.assignments == cluster]
        assert float(members.mean(dim=0) @ found.centroids[cluster].double()) > 0.9 * float(members.mean(dim=0).norm())
    phi = prototype_concentrations(z, found.centroids, found.assignments, temperature=0.2)
    torch.testing.assert_close(found.concentrations, phi.float())
    assert float(found.concentrations.mean()) == pytest.approx(0.2, rel=1e-4)


def test_the_number_of_clusters_follows_the_number_of_images_and_is_at_least_two() -> None:
    client = training(_spec(images_per_cluster=[1000, 30, 7]))
    n = len(client.data)
    assert [len(each.centroids) for each in _found(client)] == [2, max(2, n // 30), n // 7]


def test_each_epoch_has_its_own_reproducible_prototypes() -> None:
    client = training(_spec(images_per_cluster=[10]))
    # Copies, because an epoch's prototypes replace those of the previous one.
    first, second = (copy.deepcopy(_found(client, epoch=epoch)[0]) for epoch in (0, 1))
    again = _found(client, epoch=0)[0]
    assert torch.equal(first.centroids, again.centroids)
    assert not torch.equal(first.centroids, second.centroids)


@pytest.mark.parametrize(("number", "has_prototypes"), [(1, False), (3, False), (4, True), (30, True)])
def test_the_warm_up_uses_only_momentum_contrast(number: int, has_prototypes: bool) -> None:  # noqa: FBT001
    client = training(_spec(num_rounds=30), number=number)
    assert bool(_found(client)) == has_prototypes
    assert ("prototypes" in client.values(client.batch())) == has_prototypes


def test_prototypes_change_the_trained_weights() -> None:
    with_prototypes, without = (simulate(_spec(warmup_share=share), shards(_spec())) for share in (0.0, 1.0))
    name = "encoder.blocks.0.conv.weight"
    assert not torch.equal(with_prototypes.model[name], without.model[name])


def test_prototypes_and_queue_are_not_sent_and_only_the_queue_is_kept() -> None:
    spec = _spec()
    result = local_round(spec, start(spec).broadcast)
    assert {name.split(".")[0] for name in result.update} == {"encoder", "projector"}
    assert result.state.keys() == {"queue.keys", "queue.position"}


def test_a_client_with_two_images_trains() -> None:
    client = training(_spec())
    few = type(client.data)(client.data.images[:2])
    client.algorithm.begin_epoch(client.modules, few, 0, client.ctx)
    batch = next(client.algorithm.batches(few, 0, client.ctx))
    assert all(np.isfinite(value) for value in client.values(batch).values())
