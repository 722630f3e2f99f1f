"""Rounds whose BatchNorm is local or recalibrated on each client's images: what is sent, kept and combined."""

from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from fedssl.artifacts.tensors import save_tensors
from fedssl.data import normalize, to_float
from fedssl.errors import DataError, MethodError, SpecError
from fedssl.evaluation.site import weights_at_site
from fedssl.methods import METHODS
from fedssl.models import build_encoder, load_encoder
from fedssl.models.batch_norm import recalibrate
from fedssl.models.pretrained import encoder_of
from fedssl.protocol.runs import RunSpec
from fedssl.simulation import simulate
from support.encoder_folders import write_encoder_folder
from support.methods import method_spec, methods_of_this_run, shards
from support.rounds import local_round, start

NORM = ("bn.bias", "bn.num_batches_tracked", "bn.running_mean", "bn.running_var", "bn.weight")
OF_ENCODER = {f"encoder.blocks.{block}.{name}" for block in (0, 1) for name in NORM}
ALLOWED = ["fedsimclr", "fedbyol", "fedmoco", "ldawa", "orchestra", "ssd", "fedvicreg"]


def _spec(policy: str, name: str = "fedbyol", model: dict[str, Any] | None = None, **changes: Any) -> RunSpec:
    values = method_spec(name, **changes).model_dump(mode="json")
    values["model"] |= {"batch_norm": policy, **(model or {})}
    return RunSpec.model_validate(values)


def _norms(names: Any) -> set[str]:
    return {name for name in names if name.endswith(("running_mean", "running_var", "num_batches_tracked"))}


@pytest.mark.parametrize("name", methods_of_this_run(ALLOWED))
def test_local_norms_are_kept_by_the_client_and_not_sent(name: str) -> None:
    spec = _spec("local", name)
    plan, first = METHODS[name].bind(spec).plan, start(spec)
    kept = {each.name for each in plan.broadcast if each.reduce == "keep"}
    assert kept >= OF_ENCODER
    assert _norms(each.name for each in plan.update) == set()
    one, other = (local_round(spec, first.broadcast, client) for client in ("client-0", "client-1"))
    assert one.update.keys().isdisjoint(kept)
    assert kept <= one.state.keys()
    mean = "encoder.blocks.0.bn.running_mean"
    assert torch.equal(one.state[mean], other.state[mean]) == (name == "orchestra")  # only clusters in round 1


def test_a_client_continues_with_its_own_norms() -> None:
    """A round without training returns the client's own BatchNorm, and the global weights around it."""
    spec = _spec("local")
    first = start(spec)
    one, other = (local_round(spec, first.broadcast, client) for client in ("client-0", "client-1"))
    idle = _spec("local", training={"batch_size": 32, "local_epochs": 0})
    broadcast = {**first.broadcast, **other.update}
    again = local_round(idle, broadcast, "client-0", number=2, state=one.state)
    assert again.metrics["divergence"] == 0.0
    assert all(torch.equal(again.update[name], other.update[name]) for name in other.update)
    own = one.state.keys() & first.broadcast.keys()
    assert own >= OF_ENCODER
    assert any(name.startswith("predictor.") for name in own)  # those of the heads are the client's own too
    assert all(torch.equal(again.state[name], one.state[name]) for name in own)
    with pytest.raises(MethodError, match=r"client state does not fit the modules: encoder\.blocks"):
        local_round(idle, broadcast, "client-0", number=2, state={k: v for k, v in one.state.items() if k not in own})


def test_float_and_fixed_point_means_leave_local_norms_out() -> None:
    exact = _spec("local", aggregation={"arithmetic": "fixed"})
    secure = _spec("local", aggregation={"arithmetic": "fixed"}, secure_aggregation={"min_cohort": 3})
    result, masked = simulate(exact, shards(exact)), simulate(secure, shards(secure))
    for name, tensor in result.model.items():
        is_own = name in result.client_states["client-0"]
        assert torch.equal(tensor, result.initial[name]) == is_own, name
        assert torch.equal(tensor, masked.model[name])
    for client, state in result.client_states.items():
        assert all(torch.equal(tensor, masked.client_states[client][name]) for name, tensor in state.items())


def test_recalibrated_statistics_are_those_of_the_received_encoder_on_the_clients_images() -> None:
    spec = _spec("recalibrate", training={"batch_size": 32, "local_epochs": 0})
    plan, first = METHODS["fedbyol"].bind(spec).plan, start(spec)
    assert plan == METHODS["fedbyol"].bind(method_spec("fedbyol")).plan
    images = shards(spec)["client-0"].images
    update = local_round(spec, first.broadcast, "client-0").update
    encoder = encoder_of(first.broadcast, spec.model.encoder, spec.data)
    batches = [torch.from_numpy(part) for part in np.array_split(images, len(images) // 32)]
    recalibrate(encoder, [normalize(to_float(batch), spec.data) for batch in batches])
    for name, tensor in encoder.state_dict().items():
        torch.testing.assert_close(update[f"encoder.{name}"], tensor, msg=name)
    heads = [name for name in update if not name.startswith("encoder.")]
    assert all(torch.equal(update[name], first.broadcast[name]) for name in heads)
    assert not torch.equal(update["encoder.blocks.0.bn.running_mean"], torch.zeros(8))


def test_a_site_evaluates_with_its_own_norms() -> None:
    spec, model = _spec("local"), {"encoder.a": torch.ones(1), "encoder.bn": torch.zeros(1)}
    own = {"encoder.bn": torch.ones(1), "target_encoder.bn": torch.zeros(1)}
    assert weights_at_site(model, own, spec, 1) == {"encoder.a": torch.ones(1), "encoder.bn": torch.ones(1)}
    assert weights_at_site(model, None, spec, 0) is model
    assert weights_at_site(model, own, _spec("recalibrate"), 1) is model
    with pytest.raises(DataError, match="has not trained up to round 1"):
        weights_at_site(model, None, spec, 1)


def test_weights_without_trained_norms_cannot_be_loaded_without_a_client_state(tmp_path: Any) -> None:
    spec = _spec("local", "fedsimclr")
    write_encoder_folder(tmp_path, spec)
    with pytest.raises(SpecError, match=r"each site has its own: .*client_state=FILE"):
        load_encoder(tmp_path)
    result = simulate(spec, shards(spec))
    save_tensors(result.client_states["client-0"], tmp_path / "state.safetensors")
    loaded = load_encoder(tmp_path, client_state=tmp_path / "state.safetensors").encoder
    expected = result.client_states["client-0"]["encoder.blocks.1.bn.running_var"]
    assert torch.equal(loaded.state_dict()["blocks.1.bn.running_var"], expected)
    save_tensors({"target_encoder.blocks.1.bn.running_var": expected}, tmp_path / "other.safetensors")
    with pytest.raises(SpecError, match=r"other\.safetensors holds no tensor of the encoder"):
        load_encoder(tmp_path, client_state=tmp_path / "other.safetensors")


EVALUATION = {"dataset": "digits"}


@pytest.mark.parametrize(
    ("policy", "name", "changes", "reason"),
    [
        ("local", "fedema", {}, "measures how far a client's network is from the global one"),
        ("local", "fedu", {}, "dapu takes or keeps a whole predictor"),
        ("local", "fedrlc", {}, "measures how far a client's network is from the global one"),
        ("local", "fedx", {}, "fedx distils from the global network"),
        ("local", "fedprox", {}, "proximal pulls all weights to the global ones"),
        ("local", "scaffold", {}, "scaffold sends a control variate of every weight"),
        ("local", "flesd", {}, "the coordinator trains the whole encoder"),
        ("recalibrate", "flesd", {}, "the coordinator trains the whole encoder"),
        ("recalibrate", "ridge-probe", {}, "on representations of one encoder"),
        ("recalibrate", "single", {}, "averages nothing here"),
        ("local", "fedbyol", {"evaluation": EVALUATION}, 'set evaluation.at = "sites"'),
        ("local", "fedbyol", {"model": {"encoder": {"name": "vit-tiny", "patch_size": 8}}}, "has none: leave it out"),
        ("recalibrate", "fedbyol", {"model": {"encoder": {"norm": "group"}}}, "has none: leave it out"),
    ],
)
def test_methods_and_encoders_without_support_for_a_policy_are_refused(
    policy: str, name: str, changes: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ValidationError, match=reason):
        _spec(policy, name, **changes)


def test_a_policy_for_frozen_norms_is_refused_before_training() -> None:
    spec = _spec("recalibrate", model={"trainable": ["blocks.*.conv.weight"]})
    with pytest.raises(SpecError, match="the encoder has no BatchNorm that is trained"):
        start(spec)
    assert "batch_norm" not in method_spec("fedbyol").model.model_dump()
    assert build_encoder(spec.model.encoder, 1).feature_dim == 16
