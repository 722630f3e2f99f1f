"""FedMoCo: InfoNCE from the equation, the queue, the key network, and which of them persist between rounds."""

from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from fedssl.artifacts.tensors import Tensors
from fedssl.methods.composition.follower import KEYS
from fedssl.methods.composition.ring import Ring
from fedssl.methods.objectives.moco import key_queue
from fedssl.protocol.runs import RunSpec
from support.methods import method_spec, shards
from support.rounds import local_round, start, training

LINEAR = {"encoder": {"widths": [8, 16]}, "projector": {"hidden_dims": [], "out_dim": 8}}


def _spec(model: dict[str, Any] | None = None, **moco: Any) -> RunSpec:
    more = {} if model is None else {"model": model}
    return method_spec("fedmoco", method={"name": "fedmoco", **moco}, **more)


def _info_nce(query: Any, key: Any, queue: Any, temperature: float) -> float:
    """Compute He et al. 2020, Eq. 1, query by query."""
    query, key, queue = (z / np.linalg.norm(z, axis=1, keepdims=True) for z in (query, key, queue))
    terms = []
    for q, k in zip(query, key, strict=True):
        scores = np.array([q @ k, *(queue @ q)]) / temperature
        terms.append(np.log(np.exp(scores).sum()) - scores[0])
    return float(np.mean(terms))


def _random(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_the_loss_uses_both_orders_of_views_and_the_keys_enter_the_queue_afterwards() -> None:
    client = training(_spec(temperature=0.3, queue_size=48))
    with torch.no_grad():  # a key network that lags behind
        for parameter in client.modules["key_encoder"].parameters():
            parameter.add_(0.1 * _random(1, *parameter.shape))
    batch, queue = client.batch(), key_queue(client.modules)
    before = queue().double().numpy().copy()
    with torch.no_grad():
        q1, q2 = (client.modules["projector"](client.modules["encoder"](x)).double().numpy() for x in batch.views)
        k1, k2 = (
            client.modules["key_projector"](client.modules["key_encoder"](x)).double().numpy() for x in batch.views
        )
    expected = _info_nce(q1, k2, before, 0.3) + _info_nce(q2, k1, before, 0.3)
    assert client.values(batch)["info_nce"] == pytest.approx(expected, rel=1e-5)
    keys = np.concatenate([k1, k2])
    newest = (keys / np.linalg.norm(keys, axis=1, keepdims=True))[-48:]
    np.testing.assert_allclose(np.sort(queue().double().numpy(), axis=0), np.sort(newest, axis=0), atol=1e-5)


def test_the_queue_replaces_its_oldest_keys() -> None:
    queue = Ring(torch.nn.functional.normalize(torch.randn(5, 3), dim=1))
    keys = torch.nn.functional.normalize(_random(2, 9, 3), dim=1)
    for start_, stop in ((0, 2), (2, 4), (4, 6)):
        queue.push(2 * keys[start_:stop])
    torch.testing.assert_close(queue(), keys[[5, 1, 2, 3, 4]])  # the sixth has replaced the first
    queue.push(keys)  # more than fit: the last five
    torch.testing.assert_close(queue(), keys[[8, 4, 5, 6, 7]])
    queue.push(keys[:1])
    torch.testing.assert_close(queue(), keys[[8, 0, 5, 6, 7]])  # the fourth was the oldest


def test_the_queue_starts_with_random_unit_vectors_that_depend_on_the_seed() -> None:
    one, two = (key_queue(training(_spec(), client=name).modules)() for name in ("client-0", "client-1"))
    torch.testing.assert_close(one.norm(dim=1), torch.ones(len(one)))
    shortest = min(len(one), len(two))
    assert torch.equal(one[:shortest], two[:shortest])


@pytest.mark.parametrize(("share", "size", "wanted"), [(0.5, 4096, 0.5), (10.0, 48, None), (1e-6, 48, 0.0)])
def test_the_queue_of_a_small_client_is_limited_to_a_share_of_its_images(
    share: float, size: int, wanted: float | None
) -> None:
    spec = _spec(max_queue_share=share, queue_size=size)
    num_images = len(shards(spec)["client-0"])
    expected = size if wanted is None else max(1, int(wanted * num_images))
    assert len(key_queue(training(spec).modules)()) == expected


def test_the_key_network_follows_every_step_and_starts_every_round_as_a_copy() -> None:
    client = training(_spec(key_momentum=0.75))
    modules = client.modules
    start_, moved = modules["encoder"].state_dict(), {}
    assert all(torch.equal(value, start_[name]) for name, value in modules["key_encoder"].state_dict().items())
    with torch.no_grad():
        for name, parameter in modules["encoder"].named_parameters():
            moved[name] = (parameter.clone(), parameter.add_(1.0).clone())
    client.algorithm.after_step(modules, client.ctx)
    for name, parameter in modules["key_encoder"].named_parameters():
        before, after = moved[name]
        torch.testing.assert_close(parameter, 0.75 * before + 0.25 * after)
    assert not any(parameter.requires_grad for parameter in modules["key_encoder"].parameters())


def test_the_queue_persists_and_the_key_network_does_not() -> None:
    spec = _spec()
    received = start(spec).broadcast
    first = local_round(spec, received)
    assert first.state.keys() == {"queue.keys", "queue.position"}
    assert not any(name.startswith(("queue", "key_")) for name in first.update)
    other: Tensors = {name: value + 1 if value.is_floating_point() else value for name, value in received.items()}
    client = training(spec, number=2, broadcast=other, state=first.state)
    assert torch.equal(client.modules["queue"].state_dict()["keys"], first.state["queue.keys"])
    assert all(
        torch.equal(value, other[f"encoder.{name}"])
        for name, value in client.modules["key_encoder"].state_dict().items()
    )


def test_shuffling_the_batch_of_keys_does_not_change_them() -> None:
    """Shuffling is therefore left out: on one device a batch's statistics do not depend on its order."""
    client = training(_spec())
    view = client.batch().views[0]
    order = torch.randperm(len(view), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        plain, shuffled = KEYS.embed(client.modules, view), KEYS.embed(client.modules, view[order])
    torch.testing.assert_close(shuffled[order.argsort()], plain, rtol=1e-4, atol=1e-5)


def test_fedmoco_works_without_a_projector() -> None:
    client = training(_spec(model={"encoder": {"widths": [8, 16]}, "projector": None}))
    assert key_queue(client.modules)().shape[1] == 16
    assert client.values(client.batch()).keys() == {"info_nce"}


def test_the_variant_determines_the_default_temperature_and_the_projector() -> None:
    temperatures = [
        _spec(model, **moco).method.contrast_temperature  # type: ignore[union-attr]
        for model, moco in ((None, {}), (LINEAR, {"variant": "v1"}), (None, {"temperature": 0.1}))
    ]
    assert temperatures == [0.2, 0.07, 0.1]
    with pytest.raises(ValidationError, match=r"linear projector: set model.projector.hidden_dims to \[\]"):
        _spec(variant="v1")
