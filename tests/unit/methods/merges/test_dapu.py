"""FedU: what a download replaces, when the predictor is replaced, and the ablations of Table 4."""

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from fedssl.artifacts.tensors import Tensors
from fedssl.methods.merges.divergence import mean_convolution_distance
from fedssl.models import build_encoder, initialised
from fedssl.protocol.model import EncoderConfig
from fedssl.protocol.runs import RunSpec
from fedssl.simulation import simulate
from support.methods import method_spec, shards
from support.rounds import local_round, start, training
from support.tensors import are_equal

ONLINE = ("encoder", "projector")


def _spec(host: str = "fedu", **dapu: Any) -> RunSpec:
    return method_spec(host, method={"name": host, "merge": {"name": "dapu", **dapu}})


def _moved(tensors: Tensors, by: float = 0.25) -> Tensors:
    return {name: value + by if value.is_floating_point() else value for name, value in tensors.items()}


def _of(tensors: Tensors, module: str) -> Tensors:
    return {name.removeprefix(f"{module}."): v for name, v in tensors.items() if name.startswith(f"{module}.")}


def _second_download(spec: RunSpec) -> tuple[Tensors, Tensors, dict[str, Tensors]]:
    """Return a client's state after a round, the next broadcast, and the client's modules after that download."""
    broadcast = start(spec).broadcast
    state = local_round(spec, broadcast).state
    later = _moved(broadcast)
    modules = training(spec, number=2, broadcast=later, state=state).modules
    return state, later, {name: dict(module.state_dict()) for name, module in modules.items()}


def test_the_divergence_of_the_last_training_is_the_mean_of_the_convolutions_norms() -> None:
    spec = _spec()
    broadcast = start(spec).broadcast
    result = local_round(spec, broadcast)
    norms = []
    for layer in (0, 1):
        name = f"encoder.blocks.{layer}.conv.weight"
        moved = result.update[name].double().numpy() - broadcast[name].double().numpy()
        norms.append(np.sqrt((moved**2).sum()))
    assert float(result.state["dapu.distance"]) == pytest.approx(np.mean(norms), rel=1e-5)


def test_the_papers_divergence_is_a_squared_norm_over_encoder_and_projector() -> None:
    spec = _spec(distance="paper")
    broadcast = start(spec).broadcast
    result = local_round(spec, broadcast)
    buffers = ("running_mean", "running_var", "num_batches_tracked")
    names = [n for n in broadcast if n.split(".")[0] in ONLINE and not n.endswith(buffers)]
    squares = [(((result.update[n] - broadcast[n]).double().numpy()) ** 2).sum() for n in names]
    assert float(result.state["dapu.distance"]) == pytest.approx(np.sum(squares), rel=1e-5)


def test_seventeen_convolutions_of_a_resnet18_count() -> None:
    encoder = initialised(lambda: build_encoder(EncoderConfig(name="resnet18"), 3), 0)
    twin = initialised(lambda: build_encoder(EncoderConfig(name="resnet18"), 3), 0)
    with torch.no_grad():
        for name, parameter in encoder.named_parameters():  # only the convolutions that count move by 3
            moved = 3.0 if name.split(".")[-2].startswith("conv") else 1000.0
            parameter.view(-1)[0] += moved
    assert float(mean_convolution_distance(encoder, twin)) == pytest.approx(3.0, rel=1e-5)
    assert sum("conv" in name for name, _ in encoder.named_parameters()) == 17


def test_the_predictor_switches_exactly_at_the_threshold() -> None:
    distance = local_round(_spec(), start(_spec()).broadcast).state["dapu.distance"]
    above = float(np.nextafter(distance.numpy(), np.float32(np.inf)))
    for mu, follows in ((above, True), (float(distance), False)):
        spec = _spec(mu=mu)
        state, broadcast, modules = _second_download(spec)
        assert int(state["dapu.takes_global"]) == follows
        source = _of(broadcast, "predictor") if follows else _of(state, "dapu.local.predictor")
        assert are_equal(modules["predictor"], source)
        assert not are_equal(_of(broadcast, "predictor"), _of(state, "dapu.local.predictor"))
        assert all(are_equal(modules[name], _of(broadcast, name)) for name in ONLINE)


def test_a_download_does_not_change_the_target_network() -> None:
    state, _, modules = _second_download(_spec())
    assert all(are_equal(modules[f"target_{name}"], _of(state, f"target_{name}")) for name in ONLINE)


@pytest.mark.parametrize("predictor", ["dapu", "local", "global"])
@pytest.mark.parametrize("number", [1, 7])
def test_without_a_client_state_all_modules_come_from_the_broadcast(predictor: str, number: int) -> None:
    spec = _spec(predictor=predictor, update="target", mu=0.0)
    broadcast = _moved(start(spec).broadcast)
    modules = training(spec, number=number, broadcast=broadcast).modules
    for name in (*ONLINE, "predictor"):
        assert are_equal(dict(modules[name].state_dict()), _of(broadcast, name))
    for name in ONLINE:
        assert are_equal(dict(modules[f"target_{name}"].state_dict()), _of(broadcast, name))


@pytest.mark.parametrize(
    ("update", "predictor"), list(itertools.product(["online", "target", "both"], ["global", "local"]))
)
def test_the_updated_networks_are_those_of_table_4(update: str, predictor: str) -> None:
    state, broadcast, modules = _second_download(_spec(update=update, predictor=predictor))
    for name in ONLINE:
        online = _of(broadcast, name) if update != "target" else _of(state, f"dapu.local.{name}")
        assert are_equal(modules[name], online)
        target = _of(broadcast, name) if update != "online" else _of(state, f"target_{name}")
        assert are_equal(modules[f"target_{name}"], target)
    local = _of(state, "dapu.local.predictor")
    assert are_equal(modules["predictor"], _of(broadcast, "predictor") if predictor == "global" else local)


@pytest.mark.parametrize("aggregate", ["online", "target"])
def test_the_aggregated_network_is_that_of_table_4(aggregate: str) -> None:
    spec = _spec(aggregate=aggregate)
    result = local_round(spec, start(spec).broadcast)
    for name in ONLINE:
        goes_up, target = _of(result.update, name), _of(result.state, f"target_{name}")
        assert are_equal(goes_up, target) == (aggregate == "target")


@pytest.mark.full
def test_all_combinations_of_table_4_train() -> None:
    for aggregate, update in itertools.product(["online", "target"], ["online", "target", "both"]):
        spec = _spec(aggregate=aggregate, update=update, predictor="local")
        result = simulate(spec, shards(spec))
        assert all(bool(value.isfinite().all()) for value in result.model.values())


def test_dapu_works_with_other_objectives_that_predict() -> None:
    spec = _spec("fedsimsiam")
    assert simulate(spec, shards(spec)).history[-1].loss is not None


@pytest.mark.parametrize(
    ("host", "dapu", "reason"),
    [
        ("fedsimclr", {}, "fedsimclr does not have one"),
        ("fedsimsiam", {"aggregate": "target"}, "no target network"),
        ("fedsimsiam", {"update": "both"}, "no target network"),
    ],
)
def test_invalid_combinations_are_refused_with_the_reason(host: str, dapu: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValidationError, match=reason):
        _spec(host, **dapu)


def test_a_distance_over_convolutions_is_refused_for_an_encoder_without_convolutions() -> None:
    model = {"encoder": {"name": "vit-tiny", "patch_size": 4}}
    for merge, setting in (({"name": "dapu"}, "distance"), ({"name": "ema", "variant": "reference"}, "variant")):
        with pytest.raises(ValidationError, match=f"vit-tiny does not declare any: set .*{setting} to paper"):
            method_spec("fedu", method={"name": "fedu", "merge": merge}, model=model)
        method_spec("fedu", method={"name": "fedu", "merge": {**merge, setting: "paper"}}, model=model)


def test_modules_of_add_ons_are_overwritten() -> None:
    """With FedX on FedU, DAPU decides only about BYOL's predictor."""
    method = {"name": "fedu", "merge": {"name": "dapu", "mu": 0.0}, "add_ons": [{"name": "fedx"}]}
    state, broadcast, modules = _second_download(method_spec("fedu", method=method))
    assert are_equal(modules["predictor"], _of(state, "dapu.local.predictor"))
    assert are_equal(modules["fedx_predictor"], _of(broadcast, "fedx_predictor"))
