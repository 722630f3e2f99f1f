"""FedCA: its contrastive loss from the equation, alignment to the base model, and how dictionaries are combined."""

from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from fedssl.data import epoch_batches
from fedssl.engine import start_run
from fedssl.engine.distillation import DistillationProgress, run_distillation
from fedssl.errors import MethodError
from fedssl.methods import METHODS
from fedssl.methods.api import Context
from fedssl.methods.objectives.dictionary_contrast import BaseTraining, combined
from fedssl.protocol.runs import RunSpec
from fedssl.protocol.training import OptimizerConfig
from fedssl.simulation import simulate
from support.methods import CONFIGS, PUBLIC, context, method_spec, shards
from support.rounds import aggregate, local_round, start, training


def _spec(public: dict[str, Any] | None = PUBLIC, **fedca: Any) -> RunSpec:
    return method_spec("fedca", method={"name": "fedca", **CONFIGS["fedca"], **fedca}, public_data=public)


def _info_nce(query: Any, key: Any, dictionary: Any, temperature: float) -> float:
    query, key = (z / np.linalg.norm(z, axis=1, keepdims=True) for z in (query, key))
    terms = []
    for q, k in zip(query, key, strict=True):
        scores = np.array([q @ k, *(dictionary @ q)]) / temperature
        terms.append(np.log(np.exp(scores).sum()) - scores[0])
    return float(np.mean(terms))


def test_the_losses_are_those_of_the_equations() -> None:
    client = training(_spec(temperature=0.4, alignment_weight=0.3))
    modules, batch = client.modules, client.batch()
    with torch.no_grad():
        z1, z2 = (modules["projector"](modules["encoder"](x)).double().numpy() for x in batch.views)
        h = modules["encoder"](batch.extra["public"]).double().numpy()
        base = client.algorithm.build(client.ctx)["encoder"].eval()
        base.load_state_dict(
            {name.removeprefix("base_encoder."): v for name, v in client.broadcast.items() if name.startswith("base_")}
        )
        h_base = base(batch.extra["public"]).double().numpy()
    dictionary = client.broadcast["dictionary"].double().numpy()
    values = client.values(batch)
    expected = (_info_nce(z1, z2, dictionary, 0.4) + _info_nce(z2, z1, dictionary, 0.4)) / 2
    assert values["info_nce"] == pytest.approx(expected, rel=1e-4)
    distances = [np.sqrt(np.sum((a - b) ** 2)) for a, b in zip(h, h_base, strict=True)]
    assert values["alignment"] == pytest.approx(0.3 * np.mean(distances), rel=1e-4)


def test_every_batch_has_public_images_with_their_own_augmentation() -> None:
    client, plain = training(_spec()), training(_spec(alignment_weight=0))
    batch = client.batch()
    assert batch.extra["public"].shape == batch.views[0].shape
    assert plain.batch().extra == {}
    torch.testing.assert_close(plain.batch().views[0], batch.views[0])


def test_the_newest_entries_come_first_and_clients_take_turns() -> None:
    previous = torch.arange(6.0)[:, None]
    a, b = torch.tensor([[10.0], [11.0]]), torch.tensor([[20.0], [21.0]])
    assert combined(previous, [a, b]).flatten().tolist() == [10, 20, 11, 21, 0, 1]
    many = [torch.full((4, 1), float(client)) for client in range(3)]
    assert combined(previous, many).flatten().tolist() == [0, 1, 2, 0, 1, 2]


def test_a_client_sends_unit_vectors_and_the_coordinator_combines_them() -> None:
    spec = _spec(dictionary_size=100, client_dictionary_size=40)
    state = start(spec).state
    updates = [local_round(spec, state, client=f"client-{k}").update for k in range(2)]
    assert all(bool(((u["client_dictionary"].norm(dim=1) - 1).abs() < 1e-5).all()) for u in updates)
    assert not torch.equal(updates[0]["client_dictionary"], updates[1]["client_dictionary"])
    after = aggregate(spec, state, [(10, update) for update in updates]).state
    expected = combined(state["dictionary"], [update["client_dictionary"] for update in updates])
    assert torch.equal(after["dictionary"], expected)
    assert torch.equal(after["dictionary"][80:], state["dictionary"][:20])


def test_the_base_model_is_trained_once_on_public_images_and_does_not_change() -> None:
    spec = _spec()
    first, again = start(spec).state, start(spec).state
    base = {name: value for name, value in first.items() if name.startswith("base_encoder.")}
    assert base
    assert all(torch.equal(again[name], value) for name, value in base.items())
    name = "blocks.0.conv.weight"
    assert not torch.equal(base[f"base_encoder.{name}"], first[f"encoder.{name}"])
    result = simulate(spec, shards(spec))
    assert all(torch.equal(result.model[name], value) for name, value in base.items())
    longer = start(_spec(num_base_epochs=6)).state
    assert not torch.equal(longer[f"base_encoder.{name}"], base[f"base_encoder.{name}"])


def test_the_base_models_whole_training_follows_the_equations() -> None:
    """Two epochs of SimCLR's NT-Xent in plain float64, with SGD and the gradient of a linear encoder written out."""
    plain = {"channels": 1, "image_size": 8, "augmentation": {"crop": "none", "flip": 0, "jitter": 0, "greyscale": 0}}
    ctx = context(method_spec("fedca", data=plain), 0)
    linear = torch.nn.Linear(64, 6, bias=False)
    linear.weight.data = 0.1 * torch.randn(6, 64, generator=torch.Generator().manual_seed(0))
    online = torch.nn.ModuleDict({"encoder": torch.nn.Sequential(torch.nn.Flatten(), linear)})
    optimizer = OptimizerConfig(name="sgd", learning_rate=0.05, momentum=0.9, weight_decay=1e-3)
    task = BaseTraining(online, num_epochs=2, temperature=0.3, optimizer=optimizer)
    base, metrics = run_distillation(task, ctx)
    assert ctx.public is not None
    x_ND, weight, velocity = ctx.public.images.flatten(1).double().numpy() / 255, linear.weight.double(), 0.0
    weight = weight.detach().numpy()
    for epoch in range(2):
        order, losses = torch.Generator().manual_seed(ctx.seed(f"base/{epoch}")), []
        for rows in epoch_batches(len(x_ND), 32, order, ctx.spec.training.drop_last):
            x = np.concatenate([x_ND[rows], x_ND[rows]])  # the two views are equal
            z = x @ weight.T
            lengths = np.linalg.norm(z, axis=1, keepdims=True)
            scores, positive = (z / lengths) @ (z / lengths).T / 0.3, np.roll(np.eye(len(x)), len(rows), axis=1)
            shares = np.exp(scores) * (1 - np.eye(len(x)))
            shares /= shares.sum(axis=1, keepdims=True)
            losses.append(-np.log(shares[positive == 1]).mean())
            error = (shares - positive) / len(x) / 0.3
            toward = (error + error.T) @ (z / lengths)
            away = (toward - z / lengths * (toward * z / lengths).sum(axis=1, keepdims=True)) / lengths
            velocity = 0.9 * velocity + away.T @ x + 1e-3 * weight
            weight = weight - 0.05 * velocity
    assert metrics["distillation_loss"] == pytest.approx(np.mean(losses), rel=1e-6)
    np.testing.assert_allclose(base["base_encoder.1.weight"], weight, atol=1e-6)


def test_training_reduces_the_base_models_loss() -> None:
    """The loss is SimCLR's, as the engine reports it."""
    spec = _spec()
    modules = METHODS["fedca"].bind(spec).client.build(context(spec, 0))
    online = torch.nn.ModuleDict({name: modules[name] for name in ("encoder", "projector")})
    task = BaseTraining(online, num_epochs=40, temperature=0.5, optimizer=spec.training.optimizer)
    losses: list[float] = []

    def note(progress: DistillationProgress) -> None:
        assert progress.loss is not None
        losses.append(progress.loss)

    run_distillation(task, context(spec, 0), note)
    assert np.mean(losses[-5:]) < np.mean(losses[:5]) - 0.1


def test_without_alignment_neither_a_base_model_nor_public_images_are_needed() -> None:
    spec = _spec(public=None, alignment_weight=0)
    client = training(spec)
    assert client.values(client.batch()).keys() == {"info_nce"}
    assert not any(name.startswith("base_encoder.") for name in client.broadcast)


def test_alignment_is_refused_without_public_images() -> None:
    with pytest.raises(ValidationError, match=r"add a \[public_data\] section, or set method.alignment_weight to 0"):
        _spec(public=None)
    spec = _spec()
    with pytest.raises(MethodError, match="there are none here"):  # on a machine that has not loaded them
        start_run(METHODS["fedca"], Context(spec=spec, round_number=0))


def test_dictionaries_are_declared_as_such_and_the_base_model_is_kept() -> None:
    spec = _spec()
    plan = METHODS["fedca"].bind(spec).plan
    assert {t.name for t in plan.update if t.kind == "dictionary"} == {"client_dictionary"}
    assert {t.name for t in plan.broadcast if t.kind == "dictionary"} == {"dictionary"}
    assert not any(t.name.startswith("base_encoder.") for t in plan.update)
    assert {t.reduce for t in plan.broadcast if t.name.startswith("base_encoder.")} == {"keep"}


def test_a_client_with_few_images_repeats_them() -> None:
    client = training(_spec())
    few = type(client.data)(client.data.images[:3])
    update, state = client.algorithm.finish(
        client.modules, few, client.algorithm.schedule(len(few), client.ctx), client.ctx
    )
    assert update["client_dictionary"].shape == (64, 8)
    assert state == {}


def test_fedca_without_a_federation_is_refused() -> None:
    with pytest.raises(ValidationError, match="learns from what the other clients send"):
        _spec(merge={"name": "local"}, reducer={"name": "none"})
