"""FedProx: which weights it pulls, and towards what."""

from typing import Any

import pytest
import torch
from pydantic import ValidationError

from fedssl.protocol.runs import RunSpec
from support.methods import method_spec
from support.rounds import local_round, start, training


def _spec(host: str = "fedsimclr", mu: float = 0.1, **more: Any) -> RunSpec:
    return method_spec(host, method={"name": host, "add_ons": [{"name": "proximal", "mu": mu}], **more})


@pytest.mark.parametrize("host", ["fedsimclr", "fedbyol", "supervised"])
def test_the_proximal_term_is_zero_before_the_first_step_and_positive_after_it(host: str) -> None:
    client = training(_spec(host))
    batch = client.batch()
    losses = client.losses(batch)
    assert float(losses["proximal"].detach()) == 0
    torch.stack(list(losses.values())).sum().backward()  # type: ignore[no-untyped-call]
    parameters = [p for p in client.modules.parameters() if p.requires_grad]
    torch.optim.SGD(parameters, lr=0.1).step()
    moved = {name: p.detach().double() for name, p in client.modules.named_parameters() if p.requires_grad}
    by_hand = sum(float((w - client.broadcast[name].double()).square().sum()) for name, w in moved.items())
    assert by_hand > 0
    assert client.values(batch)["proximal"] == pytest.approx(0.1 / 2 * by_hand, rel=1e-5)


@pytest.mark.parametrize(
    ("host", "head"), [("supervised", "classifier"), ("fedbyol", "predictor"), ("fedsimclr", "projector")]
)
def test_the_proximal_term_includes_every_trained_head(host: str, head: str) -> None:
    client = training(_spec(host))
    with torch.no_grad():
        next(client.modules[head].parameters()).add_(1.0)
    assert client.values(client.batch())["proximal"] > 0


def test_the_proximal_term_ignores_a_target_network() -> None:
    client = training(_spec("fedbyol"))
    with torch.no_grad():
        next(client.modules["target_encoder"].parameters()).add_(1.0)
    assert client.values(client.batch())["proximal"] == 0


def test_weights_are_pulled_towards_the_broadcast_whatever_the_merge_rule() -> None:
    client = training(_spec())
    with torch.no_grad():
        for parameter in client.modules.parameters():
            parameter.zero_()
    for part in client.algorithm.add_ons:  # as after a merge rule that did not overwrite
        part.begin(client.modules, client.broadcast, client.data, client.ctx)
    names = {name for name, p in client.modules.named_parameters() if p.requires_grad}
    by_hand = sum(float(client.broadcast[name].double().square().sum()) for name in names)
    assert client.values(client.batch())["proximal"] == pytest.approx(0.1 / 2 * by_hand, rel=1e-5)


def test_a_larger_mu_keeps_weights_closer_to_the_broadcast() -> None:
    distances = []
    for mu in (0.0, 1.0, 10.0):
        spec = _spec(mu=mu)
        broadcast = start(spec).broadcast
        update = local_round(spec, broadcast).update
        names = [name for name in update if name.endswith("weight")]
        distances.append(sum(float((update[name] - broadcast[name]).square().sum()) for name in names))
    assert distances[0] > distances[1] > distances[2]


def test_a_mu_of_zero_is_fedavg() -> None:
    spec = _spec(mu=0.0)
    update = local_round(spec, start(spec).broadcast).update
    plain = method_spec("fedsimclr")
    expected = local_round(plain, start(plain).broadcast).update
    assert all(torch.equal(update[name], value) for name, value in expected.items())


def test_proximal_needs_a_global_model() -> None:
    with pytest.raises(ValidationError, match="proximal needs the global model"):
        _spec(merge={"name": "local"}, reducer={"name": "none"})
