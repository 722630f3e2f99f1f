"""Uploads as bfloat16 differences: numbers worked out by hand, the kept errors, the bytes, and what is refused."""

from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from fedssl.artifacts.header import file_bytes
from fedssl.artifacts.tensors import serialised
from fedssl.errors import SpecError
from fedssl.methods import METHODS
from fedssl.methods.composition.rounding import restored_update, rounded_update
from fedssl.protocol.runs import RunSpec
from fedssl.simulation import simulate
from support.methods import method_spec, shards
from support.rounds import aggregate, local_round, start

ROUNDED = {"dtype": "bfloat16"}


def _spec(method: str = "fedsimclr", **changes: Any) -> RunSpec:
    return method_spec(method, upload=ROUNDED, **changes)


def test_two_rounds_match_a_hand_calculation() -> None:
    """bfloat16 has 8 bits: between 1 and 2 its numbers are 1/128 apart.

    From 2 to 3 + 1/1024, the difference 1 + 1/1024 is sent as 1, and 1/1024 is kept. The next difference is 1 +
    15/1024: with the kept error it is 1 + 16/1024, which is 2/128 above 1 and is sent exactly. Nothing is left.
    """
    first, errors = rounded_update({"w": torch.tensor([3 + 1 / 1024])}, {"w": torch.tensor([2.0])}, {}, ["w"])
    assert (first["w"].dtype, float(first["w"])) == (torch.bfloat16, 1.0)
    assert float(errors["upload_error.w"]) == 1 / 1024
    restored = restored_update(first, {"w": torch.tensor([2.0])}, ["w"])
    assert (restored["w"].dtype, float(restored["w"])) == (torch.float32, 3.0)
    second, errors = rounded_update({"w": torch.tensor([1 + 15 / 1024])}, {"w": torch.tensor([0.0])}, errors, ["w"])
    assert float(second["w"]) == 1 + 16 / 1024
    assert float(errors["upload_error.w"]) == 0.0


def test_the_sent_differences_and_the_last_error_add_up_to_all_differences() -> None:
    """Over ten rounds, in float64: sum q + e = sum (x' - x), and each q has 8 bits."""
    generator, state = torch.Generator().manual_seed(3), dict[str, torch.Tensor]()
    sent, exact = np.zeros(50), np.zeros(50)
    for _ in range(10):
        received, trained = (torch.randn(50, generator=generator) for _ in range(2))
        update, state = rounded_update({"w": trained}, {"w": received}, state, ["w"])
        sent += update["w"].double().numpy()
        exact += trained.double().numpy() - received.double().numpy()
        bits = update["w"].float().view(torch.int32)
        assert not (bits & 0xFFFF).any()
    np.testing.assert_allclose(sent + state["upload_error.w"].double().numpy(), exact, atol=1e-5)
    assert np.abs(sent - exact).max() > 1e-4


def test_a_round_sends_differences_and_the_coordinator_restores_the_weights() -> None:
    """Without rounding, the weights would be those of a run in float32: they differ by at most 2^-9 of the step."""
    spec, plain = _spec(), method_spec("fedsimclr")
    first = start(spec)
    local, exact = local_round(spec, first.received), local_round(plain, first.received)
    names = [name for name, tensor in local.update.items() if tensor.dtype == torch.bfloat16]
    assert sorted(name.removeprefix("upload_error.") for name in local.state) == sorted(names)
    assert set(names) == {name for name in exact.update if name.endswith((".weight", ".bias"))}
    second = aggregate(spec, first.state, [(local.num_examples, local.update)])
    for name, tensor in exact.update.items():
        if name not in names:  # BatchNorm's statistics
            assert torch.equal(local.update[name], tensor), name
            continue
        step = (tensor - first.broadcast[name]).abs()
        assert bool(((second.broadcast[name] - tensor).abs() <= step / 256 + 1e-7).all()), name
        assert torch.equal(
            local.state[f"upload_error.{name}"],
            (tensor - first.broadcast[name]) - local.update[name].float(),
        )
    third = local_round(spec, second.received, number=2, state=local.state)
    cold = local_round(spec, second.received, number=2)
    assert any(not torch.equal(third.update[name], cold.update[name]) for name in names)
    plan = METHODS["fedsimclr"].bind(spec).plan
    assert len(serialised(local.update)) == file_bytes(plan.update)
    whole = METHODS["fedsimclr"].bind(plain).plan
    assert sum(tensor.numel() for tensor in local.update.values() if tensor.dtype == torch.bfloat16) * 2 == sum(
        tensor.numel() * tensor.element_size() for tensor in exact.update.values()
    ) - sum(tensor.numel() * tensor.element_size() for name, tensor in local.update.items())
    assert plan.broadcast == whole.broadcast


@pytest.mark.parametrize("method", ["fedbyol", pytest.param("scaffold", marks=pytest.mark.full)])
def test_methods_with_states_keep_them_and_the_rounding_errors(method: str) -> None:
    """This also holds with a norm bound, a fixed-point sum and a part of the clients in a round."""
    changes: dict[str, Any] = {
        "robustness": {"max_update_norm": 1e6},
        "aggregation": {"arithmetic": "fixed"},
        "cohort": {"min_clients": 3, "fraction": 0.67},
    }
    rounded, plain = (
        simulate(each, shards(each)) for each in (_spec(method, **changes), method_spec(method, **changes))
    )
    for name, tensor in plain.model.items():
        if tensor.is_floating_point() and not name.endswith(("running_mean", "running_var")):
            torch.testing.assert_close(rounded.model[name], tensor, rtol=0.05, atol=0.02)
    [state, *_] = rounded.client_states.values()
    assert {"upload_error.encoder.blocks.0.conv.weight"} <= state.keys()
    assert any(not name.startswith("upload_error.") for name in state)


@pytest.mark.parametrize(
    ("method", "changes", "why"),
    [
        ("single", {}, "single sends none: leave it out"),
        (
            "fedsimclr",
            {"aggregation": {"arithmetic": "fixed"}, "secure_aggregation": {"min_cohort": 3}},
            "secure_aggregation is impossible here: masks are added to exact differences: leave upload.dtype out",
        ),
    ],
)
def test_specs_whose_uploads_cannot_be_rounded_are_refused(method: str, changes: dict[str, Any], why: str) -> None:
    with pytest.raises(ValidationError, match=why):
        _spec(method, **changes)
    with pytest.raises(ValidationError, match="bfloat16"):
        method_spec("fedsimclr", upload={"dtype": "float16"})


@pytest.mark.parametrize("method", ["flesd", "ridge-probe"])
def test_methods_that_send_no_weights_are_refused_before_training(method: str) -> None:
    with pytest.raises(SpecError, match=f"upload.dtype applies to weights that are sent, and {method} sends none"):
        start(_spec(method))


def test_a_spec_without_rounding_is_serialised_as_before() -> None:
    assert "upload" not in method_spec("fedsimclr").model_dump(mode="json")
