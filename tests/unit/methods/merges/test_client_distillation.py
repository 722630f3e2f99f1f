"""FLESD's clients with their own encoders: what they keep, what they send, and what they learn from the student."""

from typing import Any

import pytest
import torch
from pydantic import ValidationError

from fedssl.artifacts.tensors import Tensors
from fedssl.engine import LocalProgress, run_local_round
from fedssl.errors import Cancelled, SpecError
from fedssl.methods import METHODS
from fedssl.methods.reducers.similarity import Ensemble, pack
from fedssl.protocol.methods.distillation import DistillationConfig, distillation_of
from fedssl.protocol.model import EncoderConfig
from fedssl.protocol.runs import RunSpec
from fedssl.simulation import simulate
from support.methods import CONFIGS, PUBLIC, context, method_spec, shards
from support.rounds import client_data, local_round, start, training

OWN: dict[str, Any] = {"client_encoders": {"client-1": {"name": "convnet", "widths": [4, 12, 24]}}}
NO_PROJECTOR: dict[str, Any] = {"model": {"encoder": {"widths": [8, 16]}, "projector": None}}
AS_THEY_ARE = {"channels": 1, "image_size": 8, "augmentation": {"crop": "none", "flip": 0, "jitter": 0, "greyscale": 0}}


def _spec(reducer: dict[str, Any] | None = None, host: str = "flesd", **changes: Any) -> RunSpec:
    config = {**CONFIGS["flesd"]["reducer"], "num_epochs": 2, **OWN, **(reducer or {})}
    sections = {"public_data": {**PUBLIC, "num_images": 72}, **changes}
    return method_spec(host, method={"name": host, "reducer": config}, **sections)


def _config(spec: RunSpec) -> DistillationConfig:
    config = distillation_of(spec.method)
    assert config is not None
    return config


def test_a_client_with_its_own_encoder_keeps_its_network() -> None:
    spec = _spec(num_rounds=3)
    plan = METHODS["flesd"].bind(spec).plan
    alike = _spec({"client_encoders": {}})
    assert plan == METHODS["flesd"].bind(alike).plan
    result = simulate(spec, shards(spec))
    assert result.client_states["client-0"] == {}
    own = result.client_states["client-1"]
    assert own["encoder.blocks.2.conv.weight"].shape == (24, 12, 3, 3)
    assert own["projector.0.weight"].shape == (16, 24)
    assert result.model["encoder.blocks.1.conv.weight"].shape == (16, 8, 3, 3)


def test_such_a_client_continues_from_its_own_weights_and_not_from_the_students() -> None:
    spec = _spec()
    broadcast = start(spec).broadcast
    state = local_round(spec, broadcast, "client-1").state
    other = {name: value + 1 if value.is_floating_point() else value for name, value in broadcast.items()}
    received = training(spec, "client-1", 2, broadcast=other, state=state).modules
    for name in ("encoder", "projector"):
        assert all(torch.equal(v, state[f"{name}.{key}"]) for key, v in received[name].state_dict().items())
    cold = [training(spec, "client-1", number, broadcast=other).modules for number in (1, 5)]
    assert all(torch.equal(a, b) for a, b in zip(cold[0].parameters(), cold[1].parameters(), strict=True))


@pytest.mark.full(but=1)
@pytest.mark.parametrize("host", ["fedsimclr", "fedmoco", "fedalignuniform"])
def test_other_objectives_support_clients_with_their_own_encoders(host: str) -> None:
    spec = _spec({"client_distillation": {"num_epochs": 2}}, host)
    result = simulate(spec, shards(spec))
    assert result.client_states["client-1"]["encoder.blocks.2.conv.weight"].shape == (24, 12, 3, 3)
    assert result.model["encoder.blocks.1.conv.weight"].shape == (16, 8, 3, 3)


@pytest.mark.full(but=2)
@pytest.mark.parametrize("packing", ["factored-f32", "factored-f16", "triangle-f16", "triangle-i8"])
def test_embeddings_of_different_widths_fit_one_plan(packing: str) -> None:
    spec = _spec({"packing": packing}, **NO_PROJECTOR)
    broadcast = start(spec).broadcast
    wide, narrow = (local_round(spec, broadcast, name).update for name in ("client-1", "client-0"))
    assert [tensor.shape for tensor in wide.values()] == [tensor.shape for tensor in narrow.values()]
    if packing == "factored-f32":
        assert wide["factor"].shape == (72, 24)
        assert bool((narrow["factor"][:, 16:] == 0).all())
    assert simulate(spec, shards(spec)).history[-1].loss is not None


def test_sending_representations_requires_equal_widths() -> None:
    same = {"client_encoders": {"client-1": {"name": "convnet", "widths": [4, 4, 16]}}}
    spec = _spec({**same, "packing": "representations-f32"}, **NO_PROJECTOR)
    assert simulate(spec, shards(spec)).history[-1].loss is not None
    with pytest.raises(ValidationError, match=r"client-1 outputs 24 numbers per image, the others 16"):
        _spec({"packing": "representations-f32"}, **NO_PROJECTOR)


# --- Learning from the student ------------------------------------------------------------------------------------

LEARNING: dict[str, Any] = {"client_distillation": {"num_epochs": 30}, "temperature": 0.2}


def _after_merge(spec: RunSpec, number: int, broadcast: Tensors, state: Tensors) -> torch.nn.ModuleDict:
    """Return the client's network between receiving the student and the first local step."""
    untrained = spec.model_copy(update={"training": spec.training.model_copy(update={"local_epochs": 0})})
    ctx = context(untrained, number, "client-1")
    result = run_local_round(METHODS["flesd"], broadcast, state, client_data(spec, "client-1"), ctx)
    return training(untrained, "client-1", 1, state=result.state).modules


def _divergence(spec: RunSpec, modules: torch.nn.ModuleDict, broadcast: Tensors) -> float:
    """Return the divergence of a network's similarities of the public images from those of the student."""
    public = context(spec, 1).public
    assert public is not None
    alike = spec.model_copy(update={"method": _spec({"client_encoders": {}}).method})
    student = training(alike, broadcast=broadcast).modules
    rows = torch.arange(len(public))

    def found(networks: torch.nn.ModuleDict) -> torch.Tensor:
        networks.eval()
        with torch.no_grad():
            z_ND = networks["projector"](networks["encoder"](public.images.float() / 255))
        return Ensemble([pack(z_ND, "factored-f32")], "factored-f32", len(rows)).rows(rows, rows, 0.2)

    p, q = found(student), found(modules)
    return float((p * (p / q).log()).sum(dim=1).mean())


def test_distillation_brings_a_client_closer_to_the_student() -> None:
    spec = _spec(LEARNING, data=AS_THEY_ARE)
    taught = method_spec("fedsimclr", num_rounds=4, training={"batch_size": 32, "local_epochs": 4})
    student = simulate(taught, shards(taught)).model  # a network of the same shape that distinguishes images
    state = local_round(spec, start(spec).broadcast, "client-1").state
    deaf = _spec({"temperature": 0.2}, data=AS_THEY_ARE)
    before, after = (_after_merge(chosen, 2, student, state) for chosen in (deaf, spec))
    assert all(torch.equal(v, state[f"encoder.{name}"]) for name, v in before["encoder"].state_dict().items())
    assert _divergence(spec, after, student) < 0.5 * _divergence(spec, before, student)


def test_clients_do_not_distil_in_the_first_round() -> None:
    spec, deaf = _spec(LEARNING), _spec({"temperature": 0.2})
    broadcast = start(spec).broadcast
    one, other = (local_round(chosen, broadcast, "client-1") for chosen in (spec, deaf))
    assert all(torch.equal(one.state[name], other.state[name]) for name in one.state)


def test_clients_with_the_runs_encoder_take_the_students_weights_as_usual() -> None:
    spec, deaf = _spec(LEARNING), _spec({"temperature": 0.2})
    broadcast = start(spec).broadcast
    one, other = (local_round(chosen, broadcast, "client-0", 2) for chosen in (spec, deaf))
    assert all(torch.equal(one.update[name], other.update[name]) for name in one.update)


def test_client_distillation_changes_the_run_and_is_reproducible() -> None:
    spec = _spec({"client_distillation": {"num_epochs": 2}})
    first, again, deaf = (simulate(chosen, shards(spec)) for chosen in (spec, spec, _spec()))
    for name, tensor in first.client_states["client-1"].items():
        assert torch.equal(tensor, again.client_states["client-1"][name])
    assert all(torch.equal(first.model[name], again.model[name]) for name in first.model)
    assert any(not torch.equal(first.model[name], deaf.model[name]) for name in first.model)


def test_client_distillation_does_not_change_what_is_sent_and_received() -> None:
    spec, deaf = _spec(LEARNING), _spec()
    assert METHODS["flesd"].bind(spec).plan == METHODS["flesd"].bind(deaf).plan


def test_client_distillation_can_be_cancelled_after_every_epoch() -> None:
    spec = _spec(LEARNING)
    broadcast = start(spec).broadcast
    state = local_round(spec, broadcast, "client-1").state
    told: list[LocalProgress] = []

    def stop(progress: LocalProgress) -> None:
        told.append(progress)
        if len(told) == 3:
            raise Cancelled("no more")

    ctx = context(spec, 2, "client-1")
    with pytest.raises(Cancelled):
        run_local_round(METHODS["flesd"], broadcast, state, client_data(spec, "client-1"), ctx, stop)
    assert [(progress.epoch, progress.num_epochs) for progress in told] == [(1, 30), (2, 30), (3, 30)]


def test_one_epoch_that_only_fills_the_queue_is_refused() -> None:
    with pytest.raises(ValidationError, match="only fill its queue and never train"):
        _spec({"num_anchors": 71, "num_epochs": 5, "client_distillation": {"num_epochs": 1}})


# --- Encoders declared by the clients --------------------------------------------------------------------------------


def test_encoders_declared_by_clients_require_a_coordinator() -> None:
    spec = _spec({"client_encoders": "declared"})
    assert RunSpec.model_validate_json(spec.model_dump_json()) == spec
    with pytest.raises(SpecError, match="only a coordinator can resolve: write the encoders out"):
        simulate(spec, shards(spec))


def test_each_client_trains_its_listed_encoder_or_the_runs() -> None:
    spec = _spec()
    config, model = _config(spec), spec.model
    assert config.encoder_of("client-1", model) == EncoderConfig(widths=(4, 12, 24))
    assert config.encoder_of("client-0", model) == model.encoder
    assert distillation_of(method_spec("fedsimclr").method) is None


def test_settings_that_an_encoder_ignores_do_not_make_it_a_different_network() -> None:
    resnet = EncoderConfig(name="resnet18")
    assert resnet.is_same_network(EncoderConfig(name="resnet18", widths=(1, 2)))
    assert not resnet.is_same_network(EncoderConfig(name="resnet18", stem="imagenet"))
    assert not resnet.is_same_network(EncoderConfig(name="resnet50"))
    assert EncoderConfig(widths=(8, 16)).is_same_network(EncoderConfig(widths=(8, 16), stem="imagenet"))
    assert not EncoderConfig(widths=(8, 16)).is_same_network(EncoderConfig(widths=(8,)))


@pytest.mark.parametrize("encoders", ["declared", OWN["client_encoders"]])
def test_add_ons_that_need_the_global_weights_are_refused(encoders: Any) -> None:
    reducer = {**CONFIGS["flesd"]["reducer"], "client_encoders": encoders}
    with pytest.raises(ValidationError, match="proximal needs the global weights"):
        method_spec("flesd", method={"name": "flesd", "reducer": reducer, "add_ons": [{"name": "proximal"}]})


@pytest.mark.parametrize(
    ("encoders", "place", "words"),
    [
        ("declard", (), 'a table of encoders by client, or "declared"'),
        (
            {"client-1": {"name": "resnet19"}},
            ("client-1", "name"),
            "'vit-tiny', 'vit-small', 'vit-base' or 'timm'",
        ),
        ({"client_1": {}}, ("client_1", "[key]"), "should match pattern"),
        (5, (), "valid dictionary"),
    ],
)
def test_an_invalid_encoder_is_reported_once_at_its_place(encoders: Any, place: tuple[str, ...], words: str) -> None:
    with pytest.raises(ValidationError) as caught:
        _spec({"client_encoders": encoders})
    (error,) = caught.value.errors()
    assert error["loc"] == ("method", "flesd", "reducer", "distillation", "client_encoders", *place)
    assert words in error["msg"]
