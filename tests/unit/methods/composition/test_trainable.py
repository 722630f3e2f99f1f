"""Rounds of methods whose encoder is partly frozen: what is trained, sent and combined."""

import math
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from fedssl.artifacts.header import file_bytes
from fedssl.artifacts.tensors import serialised
from fedssl.engine import start_run
from fedssl.errors import SpecError
from fedssl.methods import METHODS
from fedssl.protocol.plan import ArtifactPlan
from fedssl.protocol.runs import RunSpec
from fedssl.simulation import simulate
from support.methods import TRAINED_METHODS, context, method_spec, methods_of_this_run, shards
from support.rounds import aggregate, local_round, start

BATCH_NORM = ("bn.bias", "bn.num_batches_tracked", "bn.running_mean", "bn.running_var", "bn.weight")
FROZEN = {f"encoder.blocks.0.{name}" for name in (*BATCH_NORM, "conv.weight")}
MERGES: dict[str, dict[str, Any]] = {"fedu": {"merge": {"name": "dapu", "distance": "paper", "mu": 1e-3}}}


def frozen_spec(name: str, **changes: Any) -> RunSpec:
    """Return a method's spec that trains only the second of the encoder's two blocks."""
    values = method_spec(name, **changes).model_dump(mode="json")
    values["method"] |= MERGES.get(name, {})
    values["model"]["trainable"] = ["blocks.1.*"]
    return RunSpec.model_validate(values)


def plan_of(spec: RunSpec) -> ArtifactPlan:
    return METHODS[spec.method.name].bind(spec).plan


METHODS_OF_CONVNETS = [name for name in TRAINED_METHODS if name not in ("fedmae", "flesd")]


@pytest.mark.parametrize("name", methods_of_this_run(METHODS_OF_CONVNETS))
def test_frozen_tensors_keep_their_initial_values_and_are_not_sent(name: str) -> None:
    spec = frozen_spec(name)
    first = start(spec)
    locals_ = [local_round(spec, first.received, client) for client in ("client-0", "client-1")]
    if spec.method.name == "single":  # sends nothing at all
        assert all(not local.update for local in locals_)
        return
    assert all(local.update.keys().isdisjoint(FROZEN) for local in locals_)
    second = aggregate(spec, first.state, [(local.num_examples, local.update) for local in locals_])
    assert all(torch.equal(second.received[key], first.received[key]) for key in FROZEN)
    third = local_round(spec, second.received, "client-0", number=2, state=locals_[0].state)
    trained = [key for key in third.update if key.startswith("encoder.")]  # Orchestra only clusters in round 1
    assert trained
    assert all(not torch.equal(third.update[key], second.received[key]) for key in trained)
    assert third.update.keys() == locals_[0].update.keys()


@pytest.mark.parametrize("name", ["fedsimclr", "fedbyol", "ldawa", "scaffold", "fedu2"])
def test_the_plan_is_that_of_all_parameters_without_the_frozen_ones(name: str) -> None:
    whole, frozen = plan_of(method_spec(name)), plan_of(frozen_spec(name))
    controls = {f"{prefix}.{key}" for prefix in ("control", "control_delta") for key in FROZEN}
    assert [each for each in whole.update if each.name not in FROZEN | controls] == list(frozen.update)
    assert {each.name for each in frozen.broadcast} == {each.name for each in whole.broadcast} - controls - FROZEN
    assert {each.name for each in frozen.frozen if each.reduce == "keep"} == FROZEN
    assert whole.frozen == ()


def test_an_update_has_the_bytes_of_the_trained_parameters() -> None:
    """Widths 8 and 16 of grey images: 9 * 8 weights, and 4 * 8 numbers and a counter of BatchNorm, are frozen."""
    whole, frozen = method_spec("fedsimclr"), frozen_spec("fedsimclr")
    sizes = []
    for spec in (whole, frozen):
        update, plan = local_round(spec, start(spec).received).update, plan_of(spec)
        assert len(serialised(update)) == file_bytes(plan.update)
        sizes.append(sum(tensor.numel() * tensor.element_size() for tensor in update.values()))
        assert sizes[-1] == sum(math.prod(each.shape) * (8 if each.dtype == "I64" else 4) for each in plan.update)
    assert sizes[0] - sizes[1] == 4 * (9 * 8 + 4 * 8) + 8
    plan, history = plan_of(frozen), simulate(frozen, shards(frozen)).history
    assert [record.bytes_up for record in history] == [3 * file_bytes(plan.update)] * 2
    down = 3 * file_bytes(plan.broadcast)  # the frozen tensors are received once
    assert [record.bytes_down for record in history] == [down + 3 * file_bytes(plan.frozen), down]
    first = start(frozen)
    assert len(serialised(first.broadcast)) == file_bytes(plan.broadcast)
    assert len(serialised(first.frozen)) == file_bytes(plan.frozen)


def test_the_target_network_is_frozen_too() -> None:
    spec = frozen_spec("fedbyol")
    first = start(spec)
    state = local_round(spec, first.received).state
    for name in FROZEN:
        assert torch.equal(state[name.replace("encoder.", "target_encoder.", 1)], first.received[name]), name


def test_a_partly_frozen_encoder_trains_without_heads() -> None:
    model = {"encoder": {"widths": [8, 16]}, "projector": None}
    spec = frozen_spec("fedsimclr", model=model)
    assert {name.split(".")[2] for name in local_round(spec, start(spec).received).update} == {"1"}


def test_fixed_point_sums_do_not_change_frozen_tensors() -> None:
    spec = frozen_spec("fedsimclr", aggregation={"arithmetic": "fixed"})
    result = simulate(spec, shards(spec))
    assert all(torch.equal(result.model[name], result.initial[name]) for name in FROZEN)
    assert not torch.equal(result.model["encoder.blocks.1.conv.weight"], result.initial["encoder.blocks.1.conv.weight"])


def test_naming_all_parameters_gives_the_bits_of_the_default() -> None:
    spec = method_spec("fedbyol")
    named = spec.model_copy(update={"model": spec.model.model_copy(update={"trainable": ("*",)})})
    assert plan_of(named) == plan_of(spec)
    one, other = simulate(spec, shards(spec)).model, simulate(named, shards(spec)).model
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_pattern_that_matches_nothing_is_refused_before_training() -> None:
    values = method_spec("fedsimclr").model_dump(mode="json")
    values["model"]["trainable"] = ["blocks.2.*"]
    spec = RunSpec.model_validate(values)
    with pytest.raises(SpecError, match=r"blocks\.2\.\*, which matches no parameter .* blocks\.1\.\*"):
        start_run(METHODS["fedsimclr"], context(spec, 0))
    with pytest.raises(SpecError, match="matches no parameter"):
        simulate(spec, shards(spec))


@pytest.mark.parametrize(
    ("name", "method", "reason"),
    [
        ("fedu", {}, "freezes some of them: set method.merge.distance to paper"),
        ("fedema", {"merge": {"name": "ema", "variant": "reference"}}, "set method.merge.variant to paper"),
        ("flesd", {}, "the coordinator trains the whole encoder"),
    ],
)
def test_methods_that_need_the_whole_encoder_are_refused(name: str, method: dict[str, Any], reason: str) -> None:
    values = method_spec(name).model_dump(mode="json")
    values["method"] |= method
    values["model"]["trainable"] = ["blocks.1.*"]
    with pytest.raises(ValidationError, match=reason):
        RunSpec.model_validate(values)
